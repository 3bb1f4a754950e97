"""What a framework's own training loop needs of a session beyond the methods for users' loops.

Decides nothing: it passes requests on to the run of the session. Used by `outrider.integrations`; users' loops use
`Session`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from outrider.api.session import Session
from outrider.average.transport.collective import RankCollective
from outrider.policy.effects import Lease, Take
from outrider.policy.policy_spec import PolicySpec
from outrider.rank.epoch_accounting import open_leases
from outrider.rank.session_run import SessionRun
from outrider.replica.loop_replica import LoopReplica


class SessionHooks:
    """The run of an open session, for a framework."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._counts: RankCollective | None = None

    @property
    def _run(self) -> SessionRun:
        return self.session._joined()

    @property
    def _replica(self) -> LoopReplica:
        replica = self._run.replica
        assert replica is not None, "prepare() comes first"
        return replica

    @property
    def policy(self) -> PolicySpec:
        return self._run.recipe.policy_spec

    @property
    def has_ended(self) -> bool:
        return self.session._has_ended

    @property
    def is_prepared(self) -> bool:
        return self._run.replica is not None

    @property
    def local_rank(self) -> int:
        """The number of this rank among those of its host."""
        return self._run.link.environment.local_rank

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether the session was asked for checkpoints of its own."""
        config = self._run.config
        return config.checkpoint_every is not None or config.resume is not None

    # Meetings: moments in a pass at which all ranks are at one place, with equal parameters.

    def on_meeting(self, function: Callable[[], None]) -> None:
        """Call this on all ranks when they meet; the session then writes no checkpoint of its own."""
        self._run.on_meeting = function

    def ask_to_meet(self) -> None:
        """Let all ranks meet at their next average; one rank that asks is enough."""
        self._run.wants_meeting = True

    @property
    def is_stopping(self) -> bool:
        """At a meeting: whether a signal ends the loop after it; the same on all ranks."""
        return self._run.wants_stop

    def settle(self) -> None:
        """End a pass that was left by `break` on all ranks."""
        self.session._settle()

    def leave_out(self, seconds: float) -> None:
        """So much of the time of the batch in hand was not training."""
        self._run.leave_out(seconds)

    def remaining(self, *, done: int) -> list[list[int]] | None:
        """The ranges of the pass that come after so many of its samples; None between two passes."""
        return self._run.remaining_after(done)

    @property
    def done_at_meeting(self) -> int | None:
        """Samples of the pass that averages have accounted for, at a meeting; None between two passes."""
        return self._run.position

    def go_on_from(self, epoch: int, *, samples_before: int, remaining: list[list[int]] | None) -> None:
        """Begin where a checkpoint of the framework was taken; call it between prepare() and epochs()."""
        self._run.go_on_from(epoch, samples_before=samples_before, remaining=remaining)

    def begin_at_pass(self, number: int) -> None:
        """So many passes were trained before: the next one has the order of this number; for loops without epochs()."""
        self.session._num_passes = number

    # The batch in hand

    @property
    def is_shared(self) -> bool:
        """Whether all ranks take the step of this batch together."""
        return self._run.loop.is_shared

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of a part of the batch; `add_loss` then counts the loss of the whole."""
        self._replica.backward(loss)

    def add_loss(self, loss: torch.Tensor) -> None:
        """Count the mean loss of this rank's batch; one that is not finite is an error."""
        replica = self._replica
        replica.loss_sums.add(loss, self.session.batch_samples, replica.steps)
        if self.session.device.type == "cpu":
            replica.check_loss()

    def saw_loss(self, loss: torch.Tensor) -> None:
        """Count the loss of a backward pass that the framework ran by itself; those of one step add up."""
        self._replica.saw_loss(loss, self.session.batch_samples)

    def share_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """In a shared step, replace gradients by their mean over ranks now; the step does not average them again."""
        scaler = self._replica.scaler
        # A scaler averages by itself, once gradients are unscaled.
        if scaler is None or not scaler.is_enabled:
            self._run.loop.share_early(optimizer)

    # Between ranks

    def exchange(self, value: Any, *, what: str) -> list[Any]:
        """The JSON values of all ranks, in the order of ranks; all ranks call this at one place."""
        return self._run.world.exchange_json(value, name=what, what=f"{what} of all ranks")

    def counts(self, values: Sequence[int]) -> list[list[int]]:
        """The same for a few whole numbers, quickly; all ranks call this."""
        if self.session.world_size == 1:
            return [list(values)]
        if self._counts is None:
            self._counts = self._run.world.collective_for("cpu", what="counts")
        return self._counts.gather(values)

    def numbers(self, name: str, count: int) -> Iterator[int]:
        """Whole numbers below `count`, each given to one rank, which asks when it is ready; all ranks call this."""
        world = self._run.world
        leases = open_leases(world, f"numbers/{name}", Lease(0, count), batch_size=1)
        while (lease := leases.take(Take(1, share=1.0))) is not None:
            yield lease.start
