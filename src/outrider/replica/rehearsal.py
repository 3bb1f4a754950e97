"""Tries steps on a replica before it trains, and puts everything back: can they be captured, and what do they take?

Decides what proves that a captured step computes the same as an eager one. What follows from it is decided in
`execution`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from outrider.data.parcel import Parcel
from outrider.replica.capture import CaptureStream, Uncapturable, no_waits
from outrider.replica.captured import CapturedSteps
from outrider.replica.logbook import Logbook
from outrider.replica.rates import OptimizerForm, make_capturable
from outrider.replica.replica import Replica
from outrider.replica.snapshot import HostRandomness, Snapshot, kept_between_steps
from outrider.replica.tally import LossTally

COMPARED_STEPS = 6
"""Of a captured trial the first two run eagerly."""
TIMED_STEPS = 8
LOSS_TOLERANCE = {"fp32": 2e-3, "bf16": 2e-2}
"""How far, relative to its size, a loss may be off after a few steps; kernels may add in another order."""

Step = Callable[[], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What a few steps of one kind gave, all on the same batch."""

    losses: tuple[float, ...]
    ms: float


class Rehearsal:
    """Trials on a CUDA replica, each from the same beginning."""

    def __init__(self, replica: Replica, parcel: Parcel, *, samples: int, stream: CaptureStream) -> None:
        self._replica = replica
        self._parcel = parcel
        self._samples = samples
        self._stream = stream
        self._snapshot = Snapshot(replica)
        self._form = OptimizerForm(replica.optimizer)

    def eager(self) -> Trial:
        """Errors of the user's own come out of these steps as they would in training."""
        with self._put_back():
            return self._try(self._plain_step)

    def captured(self, expected: Trial) -> Trial:
        """Raises Uncapturable where a captured step is impossible, or would compute something else than expected."""
        with self._put_back():
            self._check_host_state()
            self._check_waits()
            refusals: list[str] = []
            steps = CapturedSteps(self._replica, stream=self._stream, on_refusal=refusals.append)
            trial = self._try(lambda: steps.step(self._parcel, samples=self._samples, at=0))
            if refusals:
                raise Uncapturable(refusals[0])
            self._compare(expected.losses, trial.losses)
            return trial

    @contextlib.contextmanager
    def _put_back(self) -> Iterator[None]:
        """A tally and a logbook for the trial alone; afterwards the replica is as it was."""
        replica = self._replica
        tally, logbook = replica.tally, replica.logbook
        replica.tally, replica.logbook = LossTally(replica.device), Logbook()
        try:
            yield
        finally:
            replica.tally, replica.logbook = tally, logbook
            self._form.restore()
            self._snapshot.restore()

    def _plain_step(self) -> None:
        self._stream.run(lambda: self._replica.plain_step(self._parcel.batch(), samples=self._samples, at=0))

    def _try(self, step: Step) -> Trial:
        self._snapshot.restore()
        self._replica.tally.drain()
        losses = tuple(self._loss_of(step) for _ in range(COMPARED_STEPS))
        return Trial(losses=losses, ms=self._ms_of(step))

    def _loss_of(self, step: Step) -> float:
        step()
        total, samples = self._replica.tally.drain()
        return total / samples

    def _ms_of(self, step: Step) -> float:
        torch.cuda.synchronize(self._replica.device)
        started_s = time.perf_counter()
        for _ in range(TIMED_STEPS):
            step()
        torch.cuda.synchronize(self._replica.device)
        return (time.perf_counter() - started_s) * 1e3 / TIMED_STEPS

    def _check_waits(self) -> None:
        make_capturable(self._replica.optimizer, self._replica.device)
        self._snapshot.restore()
        # What follows a new random state waits once, as the dropout of an LSTM does, which is seeded anew.
        self._plain_step()
        with no_waits():
            for _ in range(2):
                self._plain_step()

    def _check_host_state(self) -> None:
        """What a step keeps or draws on the host would happen once, in the capture, and never again."""
        self._plain_step()
        randomness, before = HostRandomness(), kept_between_steps(self._replica.model)
        self._plain_step()
        if randomness.was_drawn_from():
            raise Uncapturable("it draws random numbers on the host")
        after = kept_between_steps(self._replica.model)
        changed = [name for name, kept in after.items() if name in before and not kept.is_same(before[name])]
        if changed:
            raise Uncapturable(f"the model keeps {changed[0]} from one step to the next outside its buffers")

    def _compare(self, expected: tuple[float, ...], got: tuple[float, ...]) -> None:
        tolerance = LOSS_TOLERANCE[self._replica.recipe.precision]
        for number, (eager, captured) in enumerate(zip(expected, got, strict=True)):
            if not abs(captured - eager) <= tolerance * max(1.0, abs(eager)):
                raise Uncapturable(f"its loss at step {number} would be {captured:.6g} instead of {eager:.6g}")
