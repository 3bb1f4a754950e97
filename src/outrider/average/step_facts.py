"""Decides which facts ranks send with the gradients of a shared step, and how they are written into summed slots.

The facts are the samples, the caller's facts, which parameters had a gradient, and whether gradients were finite. Does
not communicate. Called by GradientExchange and GradientPieces.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from outrider.average.arena import Arena
from outrider.average.rank_facts import Settled, Tail
from outrider.average.wire_plan import wire_dtype
from outrider.errors import ConfigError

# The numbers before the caller's facts in each row: samples, and whether the gradients are not finite.
_NUM_OWN = 2
_IS_BAD = 1


class StepFacts:
    """Writes the slots of one rank, which are summed over ranks, and reads the facts from the sum."""

    def __init__(self, arena: Arena, *, rank: int, world_size: int, num_facts: int, pin_memory: bool = False) -> None:
        takes_all = arena.layout.takes_all
        self.parameters: list[nn.Parameter] = [one for one in arena.parameters if one.requires_grad or not takes_all]
        """The participating parameters."""
        self.has_all = False
        """Whether every parameter had a gradient when the slots were written."""
        self._frozen = arena.frozen
        self._unexpected = [one for one in arena.parameters if takes_all and not one.requires_grad]
        self._num_facts = num_facts
        self._tail = Tail(rank=rank, world_size=world_size, num_values=_NUM_OWN + num_facts)
        self.num_slots = self._tail.num_slots + len(self.parameters)
        self.own = torch.zeros(self.num_slots, dtype=self._widest(), pin_memory=pin_memory)
        """The slots that this rank sends, in host memory."""
        self._own_presence = self.own[self._tail.num_slots :]

    def write(self, samples: int, facts: Sequence[float]) -> None:
        """Write this rank's slots; removes gradients of frozen parameters."""
        assert len(facts) == self._num_facts, f"{len(facts)} facts, {self._num_facts} expected"
        self._refuse_thawed()
        for parameter in self._frozen:
            parameter.grad = None
        self._tell_presence(samples)
        self._tail.encode([samples, 0.0, *facts], self._tail.own_row(self._tail_of(self.own)))

    def mark_bad(self, slots: Tensor, probe: Tensor) -> None:
        """Mark this rank if `probe` is not finite; runs on their device, so that the host need not wait."""
        self._tail.own_row(self._tail_of(slots))[_IS_BAD, 0].copy_(~torch.isfinite(probe))

    def share(self, slots: Tensor) -> Tensor:
        """One over the samples of all ranks, on the device of the slots."""
        return self._tail.total_samples(self._tail_of(slots)).clamp(min=1.0).reciprocal()

    def has_bad(self, slots: Tensor) -> Tensor:
        """Whether the gradients of any rank are not finite, on the device of the slots."""
        return (self._tail.column(self._tail_of(slots), _IS_BAD) > 0).any()

    def num_present(self, slots: Tensor) -> list[float]:
        """The number of ranks with a gradient, for each parameter; waits for the device."""
        counts: list[float] = slots[self._tail.num_slots :].tolist()
        return counts

    def settled(self, slots: Tensor) -> Settled:
        """The facts of all ranks; waits for the device."""
        rows = self._tail.decode(self._tail_of(slots).cpu())
        return Settled(
            facts=tuple(tuple(row[_NUM_OWN:]) for row in rows),
            total_samples=round(sum(row[0] for row in rows)),
            not_finite=tuple(rank for rank, row in enumerate(rows) if row[_IS_BAD]),
        )

    def _tail_of(self, slots: Tensor) -> Tensor:
        return slots[: self._tail.num_slots]

    def _widest(self) -> torch.dtype:
        dtypes = {wire_dtype(one.dtype.to_real() if one.is_complex() else one.dtype) for one in self.parameters}
        return max(dtypes or {torch.float32}, key=lambda dtype: dtype.itemsize)

    def _tell_presence(self, samples: int) -> None:
        present = [parameter.grad is not None for parameter in self.parameters]
        self.has_all = samples > 0 and all(present)
        if self.has_all:
            self._own_presence.fill_(1.0)
        elif samples:
            self._own_presence.copy_(torch.tensor(present))
        else:
            self._own_presence.zero_()

    def _refuse_thawed(self) -> None:
        for parameter in self._unexpected:
            if parameter.grad is not None:
                raise ConfigError(
                    f"a frozen parameter of shape {tuple(parameter.shape)} got a gradient after training began",
                    hint="set requires_grad before training starts",
                )
