"""Runs trial steps on a replica before training to see which executions work and how fast; restores it afterwards.

Decides whether a captured step computes the same as an eager one, which matrix products a step has, and whether a
model runs in channels_last. `execution` and `rank.step_choice` use the results.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outrider.data import randomness
from outrider.data.packed_batch import PackedBatch
from outrider.errors import OutriderError
from outrider.replica.capturable_optimizer import OptimizerForm, make_capturable
from outrider.replica.capture import CaptureStream, Uncapturable, no_waits
from outrider.replica.captured import CapturedSteps
from outrider.replica.half_products import HalfProduct, ProductRecorder
from outrider.replica.logged_scalars import LoggedScalars, writing
from outrider.replica.loss_sums import LossSums
from outrider.replica.replica import Replica
from outrider.replica.snapshot import Snapshot, kept_between_steps
from outrider.replica.tuning import to_channels_last

COMPARED_STEPS = 6
"""Number of trial steps; the first two of a captured trial run eagerly."""
TIMED_STEPS = 8
SLOW_MS = 100.0
"""If a step takes longer, two steps measure it well enough, without a wait for eight."""
TENSOR_CORES = (7, 0)
"""From this compute capability on, convolutions were measured to be faster in channels_last."""
LOSS_TOLERANCE = {"fp32": 2e-3, "bf16": 2e-2}
"""Relative tolerance of a loss after a few steps, because kernels may sum in another order."""

Step = Callable[[], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The result of a few steps of one kind, all on the same batch."""

    losses: tuple[float, ...]
    ms: float


class Rehearsal:
    """Trials on a CUDA replica, each from the same state."""

    def __init__(self, replica: Replica, packed_batch: PackedBatch, *, samples: int, stream: CaptureStream) -> None:
        self._replica = replica
        self._packed_batch = packed_batch
        self._samples = samples
        self._stream = stream
        self._snapshot = Snapshot(replica)
        self._form = OptimizerForm(replica.optimizer)

    def eager(self) -> Trial:
        """Run eager steps; errors of user code are raised as in training."""
        with self._put_back():
            return self._try(self._plain_step)

    def captured(self, expected: Trial) -> Trial:
        """Run captured steps; raises Uncapturable if capture fails or computes another result."""
        with self._put_back():
            self._check_host_state()
            self._check_waits()
            refusals: list[str] = []
            steps = CapturedSteps(self._replica, stream=self._stream, on_refusal=refusals.append)
            trial = self._try(lambda: steps.step(self._packed_batch, samples=self._samples, at=0))
            if refusals:
                raise Uncapturable(refusals[0])
            self._compare(expected.losses, trial.losses)
            return trial

    @contextlib.contextmanager
    def _put_back(self) -> Iterator[None]:
        try:
            with _put_back(self._replica, self._snapshot):
                yield
        finally:
            self._form.restore()

    def _plain_step(self) -> None:
        self._stream.run(lambda: self._replica.plain_step(self._packed_batch.batch(), samples=self._samples, at=0))

    def _try(self, step: Step) -> Trial:
        self._snapshot.restore()
        self._replica.loss_sums.drain()
        losses = tuple(self._loss_of(step) for _ in range(COMPARED_STEPS))
        return Trial(losses=losses, ms=self._ms_of(step))

    def _loss_of(self, step: Step) -> float:
        step()
        total, samples = self._replica.loss_sums.drain()
        return total / samples

    def _ms_of(self, step: Step) -> float:
        first_ms = self._ms_over(2, step)
        return first_ms if first_ms > SLOW_MS else self._ms_over(TIMED_STEPS, step)

    def _ms_over(self, steps: int, step: Step) -> float:
        torch.cuda.synchronize(self._replica.device)
        started_s = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize(self._replica.device)
        return (time.perf_counter() - started_s) * 1e3 / steps

    def _check_waits(self) -> None:
        make_capturable(self._replica.optimizer, self._replica.device)
        self._snapshot.restore()
        # After a new random state, some operations wait once; for example, the dropout of an LSTM is seeded again.
        self._plain_step()
        with no_waits():
            for _ in range(2):
                self._plain_step()

    def _check_host_state(self) -> None:
        """Raise for steps that keep values or draw random numbers on the host, which a graph would not repeat."""
        self._plain_step()
        drawn_before, before = randomness.capture(), kept_between_steps(self._replica.model)
        self._plain_step()
        if not randomness.capture().equals(drawn_before):
            raise Uncapturable("it draws random numbers on the host")
        after = kept_between_steps(self._replica.model)
        changed = [name for name, kept in after.items() if name in before and not kept.is_same(before[name])]
        if changed:
            raise Uncapturable(f"the model keeps {changed[0]} from one step to the next outside its buffers")

    def _compare(self, expected: tuple[float, ...], got: tuple[float, ...]) -> None:
        tolerance = LOSS_TOLERANCE[self._replica.precision]
        for number, (eager, captured) in enumerate(zip(expected, got, strict=True)):
            if not abs(captured - eager) <= tolerance * max(1.0, abs(eager)):
                raise Uncapturable(f"its loss at step {number} would be {captured:.6g} instead of {eager:.6g}")


@contextlib.contextmanager
def _put_back(replica: Replica, snapshot: Snapshot) -> Iterator[None]:
    """Use separate loss sums and logged scalars during a trial, and restore the replica afterwards."""
    loss_sums, logged_scalars = replica.loss_sums, replica.logged_scalars
    replica.loss_sums, replica.logged_scalars = LossSums(replica.device), LoggedScalars()
    try:
        yield
    finally:
        replica.loss_sums, replica.logged_scalars = loss_sums, logged_scalars
        snapshot.restore()


def products_of_step(replica: Replica, batch: Any, *, samples: int) -> tuple[HalfProduct, ...]:
    """The matrix products in half precision of one forward and backward pass."""
    recorder = ProductRecorder()
    # An error here occurs again in the first step, and is reported there.
    with _put_back(replica, Snapshot(replica)), contextlib.suppress(OutriderError), recorder:
        replica.compute_gradient(batch, samples=samples)
    return recorder.products


# The memory format


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatChoice:
    """channels_last or contiguous, and the reason."""

    value: str
    reason: str


def choose_memory_format(replica: Replica, batch: Any) -> FormatChoice:
    """The best format for this device; all ranks must use the same one, because arenas are summed by element."""
    asked, device = replica.recipe.memory_format, replica.device
    if asked != "auto":
        return FormatChoice(value=asked, reason=f"memory_format={asked} was given")
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < TENSOR_CORES:
        return FormatChoice(value="contiguous", reason=f"{replica.name} has no tensor cores")
    if not any(isinstance(module, nn.Conv2d | nn.ConvTranspose2d) for module in replica.model.modules()):
        return FormatChoice(value="contiguous", reason="the model has no convolutions over images")
    with randomness.preserved():
        return _tried(replica, batch)


def _tried(replica: Replica, batch: Any) -> FormatChoice:
    model = copy.deepcopy(replica.model)
    to_channels_last(model)
    try:
        with writing(LoggedScalars(), samples=1), replica.autocast():
            loss = replica.recipe.step(model, batch)
        loss.backward()
    except Exception as error:  # an error of the user's own comes again in the first step, and is reported there
        lines = str(error).splitlines() or [""]
        return FormatChoice(value="contiguous", reason=f"the step does not bear channels_last: {lines[0]}")
    return FormatChoice(value="channels_last", reason="convolutions over images on tensor cores")


def agree(choices: list[FormatChoice]) -> FormatChoice:
    """The format that all ranks can use."""
    for rank, choice in enumerate(choices):
        if choice.value != choices[0].value:
            other = choice if choice.value == "contiguous" else choices[0]
            return FormatChoice(value="contiguous", reason=f"for rank {rank} beside rank 0: {other.reason}")
    return choices[0]
