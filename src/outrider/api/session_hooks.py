"""Methods of a session that only a framework's training loop needs; users' own loops need `Session` alone.

Decides nothing: it passes requests on to the run of the session. Used by `outrider.integrations`.
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
    """Gives a framework access to the run of an open session."""

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
        """The number of this rank among the ranks of its host."""
        return self._run.link.environment.local_rank

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether the session writes or resumes its own checkpoints."""
        config = self._run.config
        return config.checkpoint_every is not None or config.resume is not None

    def share_always(self) -> None:
        """Let every rank run the loop for every batch of shared steps; called before the first one, on all ranks.

        Frameworks count steps, log and call back on every rank.
        """
        self._run.share_always()

    # Meetings: points in a pass at which all ranks are at the same position, with equal parameters.

    def on_meeting(self, function: Callable[[], None]) -> None:
        """Set a function that every rank calls at meetings; the session then writes no checkpoints of its own."""
        self._run.on_meeting = function

    def ask_to_meet(self) -> None:
        """Request a meeting of all ranks at their next average; the request of one rank is enough."""
        self._run.wants_meeting = True

    @property
    def is_stopping(self) -> bool:
        """At a meeting: whether a signal will end the loop after it; the same on all ranks."""
        return self._run.wants_stop

    def settle(self) -> None:
        """End a pass that was left by `break` on all ranks."""
        self.session._settle()

    def leave_out(self, seconds: float) -> None:
        """Exclude this much of the current batch's time from the training time."""
        self._run.leave_out(seconds)

    def remaining(self, *, done: int) -> list[list[int]] | None:
        """The ranges of the pass that remain after its first `done` samples; None between two passes."""
        return self._run.remaining_after(done)

    @property
    def done_at_meeting(self) -> int | None:
        """Samples of the pass that averages have accounted for, at a meeting; None between two passes."""
        return self._run.position

    def go_on_from(self, epoch: int, *, samples_before: int, remaining: list[list[int]] | None) -> None:
        """Continue from the position of a framework's checkpoint; call this between prepare() and epochs()."""
        self._run.go_on_from(epoch, samples_before=samples_before, remaining=remaining)

    def begin_at_pass(self, number: int) -> None:
        """Give the next pass this number, which decides its order; for loops without epochs()."""
        self.session._num_passes = number

    # The current batch

    @property
    def is_shared(self) -> bool:
        """Whether all ranks take the step of this batch together."""
        return self._run.loop.is_shared

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of a part of the batch; `add_loss` then counts the loss of the whole batch."""
        self._replica.backward(loss)

    def add_loss(self, loss: torch.Tensor) -> None:
        """Count the mean loss of this rank's batch; a loss that is not finite is an error."""
        replica = self._replica
        replica.loss_sums.add(loss, self.session.batch_samples, replica.steps)
        if self.session.device.type == "cpu":
            replica.check_loss()

    def saw_loss(self, loss: torch.Tensor) -> None:
        """Count the loss of a backward pass that the framework ran itself; the losses of one step add up."""
        self._replica.saw_loss(loss, self.session.batch_samples)

    def share_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """In a shared step, replace gradients by their mean over ranks now; the step does not average them again."""
        scaler = self._replica.scaler
        # With a GradScaler, gradients are averaged once they are unscaled.
        if scaler is None or not scaler.is_enabled:
            self._run.loop.share_early(optimizer)

    # Between ranks

    def exchange(self, value: Any, *, what: str) -> list[Any]:
        """Gather a JSON value from all ranks in rank order; all ranks call this at the same point."""
        return self._run.world.exchange_json(value, name=what, what=f"{what} of all ranks")

    def counts(self, values: Sequence[int]) -> list[list[int]]:
        """Gather a few integers from all ranks, faster than `exchange`; all ranks call this."""
        if self.session.world_size == 1:
            return [list(values)]
        if self._counts is None:
            self._counts = self._run.world.collective_for("cpu", what="counts")
        return self._counts.gather(values)

    def numbers(self, name: str, count: int) -> Iterator[int]:
        """Divide the integers below `count` among ranks: each goes to one rank, on demand. All ranks call this."""
        world = self._run.world
        leases = open_leases(world, f"numbers/{name}", Lease(0, count), batch_size=1)
        while (lease := leases.take(Take(1, share=1.0))) is not None:
            yield lease.start
