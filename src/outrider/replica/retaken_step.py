"""Repeats the gradient of a batch in smaller micro-batches when a device runs out of memory.

Decides what to restore before a repetition: random states and buffers as at the step's start; gradients are dropped.
Losses and logged scalars count only when the whole batch is done, and the optimizer has not begun, so nothing else
needs a copy. Called by the replica for eager and compiled steps; the replay of a captured step allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from outrider.average.arena import Arena
from outrider.data import randomness
from outrider.errors import OutriderError, StepError, named
from outrider.policy.effects import Decision
from outrider.replica.micro_batches import MicroBatches
from outrider.replica.out_of_memory import HINT, free_memory, is_out_of_memory, memory_words


class Retakeable(Protocol):
    """The part of a replica that this module uses."""

    device: torch.device
    rank: int
    name: str
    steps: int
    arena: Arena
    optimizer: torch.optim.Optimizer
    micro_batches: MicroBatches

    def give_up_captures(self, reason: str) -> bool: ...

    def resize_compiled(self, samples: int) -> None: ...


class RetakenSteps:
    """Repeats gradients of one replica until they fit in memory."""

    def __init__(
        self, replica: Retakeable, *, on_shrink: Callable[[Decision], None], batch_sampler: str | None = None
    ) -> None:
        """`on_shrink` is called once per repeated step, with the new size of the micro-batches.

        Batches of a `batch_sampler` are computed whole: each counts as one sample.
        """
        self._replica = replica
        self._batch_sampler = batch_sampler
        self._on_shrink = on_shrink
        self._buffers = _BufferCopy(replica)
        self._draws_on_host: bool | None = None
        """Whether steps draw from the generators of Python or NumPy; None before the first step."""
        self.num_retaken = 0
        """Number of repeated steps; their time tells nothing about the speed of the device."""

    def run(self, gradient: Callable[[], None], *, samples: int) -> None:
        """Compute a gradient; raises if a single sample does not fit."""
        start = _StepStart(self._replica, self._buffers, is_full=self._draws_on_host is not False)
        tried = self._replica.micro_batches.counts(samples)[0]
        is_retaken = False
        while not self._fits(gradient, samples, tried=tried):
            # The exception is gone here, and so are the frames that held the activations.
            free_memory(self._replica.device)
            start.put_back()
            is_retaken = True
        if self._draws_on_host is None:
            self._draws_on_host = start.host_has_drawn()
        if is_retaken:
            self.num_retaken += 1
        if self._replica.micro_batches.counts(samples)[0] != tried:
            self._tell(tried, samples)

    def _fits(self, gradient: Callable[[], None], samples: int, *, tried: int) -> bool:
        size = self._replica.micro_batches.counts(samples)[0]
        try:
            gradient()
        except OutriderError as error:
            if not is_out_of_memory(error) and size == tried:
                raise
            if not is_out_of_memory(error):
                cause = error.message if error.__cause__ is None else named(error.__cause__)
                trouble = f"out of memory with {tried} samples at once, and in micro-batches of {size}: {cause}"
                raise self._error(trouble, error.hint) from error
            # Captured steps keep memory for their activations, in addition to that of other steps.
            if not self._replica.give_up_captures("its memory is needed by steps of other sizes"):
                self._shrink(samples, error)
            return False
        return True

    def _error(self, trouble: str, hint: str | None) -> StepError:
        replica = self._replica
        message = f"rank {replica.rank} ({replica.name}), step {replica.steps}: {trouble}"
        return StepError(message, hint=hint, rank=replica.rank, step=replica.steps)

    def _shrink(self, samples: int, error: OutriderError) -> None:
        replica = self._replica
        if not replica.micro_batches.can_shrink(samples):
            raise self._too_large() from error.__cause__
        replica.micro_batches.shrink(samples)

    def _too_large(self) -> StepError:
        name, memory = self._batch_sampler, memory_words(self._replica.device)
        if name is None:
            return self._error(f"out of memory with a single sample{memory}", HINT)
        trouble = f"out of memory with a batch of {name}, which is computed whole{memory}"
        return self._error(trouble, f"let {name} make smaller batches, or {HINT}")

    def _tell(self, tried: int, samples: int) -> None:
        size = self._replica.micro_batches.counts(samples)[0]
        self._replica.resize_compiled(size)
        reason = f"out of memory with {tried} samples at once{memory_words(self._replica.device)}"
        self._on_shrink(Decision("micro-batch", size, reason, {"step": self._replica.steps, "tried": tried}))


class _StepStart:
    """The state before a forward and backward pass of everything that the pass may change."""

    def __init__(self, replica: Retakeable, buffers: _BufferCopy, *, is_full: bool) -> None:
        """`is_full` includes the generators of Python and NumPy, whose states take longer to read than a small step."""
        self._replica = replica
        self._buffers = buffers
        self._host = randomness.capture() if is_full else None
        self._torch = torch.default_generator.get_state()
        self._device = randomness.device_state(replica.device)
        buffers.take()

    def put_back(self) -> None:
        replica = self._replica
        if self._host is not None:
            randomness.restore(self._host)
        torch.default_generator.set_state(self._torch)
        if self._device is not None:
            randomness.restore_device(replica.device, self._device)
        self._buffers.put_back()
        replica.optimizer.zero_grad(set_to_none=True)

    def host_has_drawn(self) -> bool:
        """Whether Python's or NumPy's generators have advanced since."""
        assert self._host is not None
        now = randomness.capture()
        return not self._host.equals(randomness.RandomStates(python=now.python, numpy=now.numpy, torch=self._torch))


class _BufferCopy:
    """A copy of the buffers, such as BatchNorm's running statistics, which a forward pass changes."""

    def __init__(self, replica: Retakeable) -> None:
        self._replica = replica
        self._arena: Arena | None = None
        self._sections: list[Tensor] = []
        """The float buffers in the arena, one range per dtype."""
        self._floats: list[Tensor] = []
        self._integers: list[Tensor] = []

    @torch.no_grad()
    def take(self) -> None:
        """Copy the buffers; called at every step, so it reads the layout only if that is new."""
        arena = self._replica.arena
        if arena is not self._arena:
            self._arena = arena
            ranges = [flat[arena.parameter_numel[dtype] :] for dtype, flat in arena.flats.items()]
            self._sections = [one for one in ranges if one.numel()]
            self._floats = [torch.empty_like(one) for one in self._sections]
            self._integers = [torch.empty_like(one) for one in arena.integers]
        _copy_all(self._sections, into=self._floats)
        if self._integers:
            _copy_all(arena.integers, into=self._integers)

    @torch.no_grad()
    def put_back(self) -> None:
        self._replica.arena.reclaim()
        _copy_all(self._floats, into=self._sections)
        _copy_all(self._integers, into=self._replica.arena.integers)


def _copy_all(tensors: list[Tensor], *, into: list[Tensor]) -> None:
    if len(tensors) == 1:
        into[0].copy_(tensors[0])
    elif tensors:
        torch._foreach_copy_(into, tensors)
