"""Decides what one rank contributes to a shared step, and turns the sum into every rank's gradients.

Does not communicate or clip: between pack and settle somebody sums the wires. Called by the rank driver and the lab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.average.arena import Arena
from outrider.average.exchange import same_device
from outrider.average.facts import Settled, Tail
from outrider.average.layout import Place, Planner
from outrider.average.wire import wire_dtype
from outrider.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class _Body:
    """The gradients of one wire: as summed, on the parameters' device, and rounded to the parameters' dtypes."""

    summed: Tensor
    staged: Tensor
    """The same memory as `summed`, unless parameters and wires are on different devices."""
    sections: dict[torch.dtype, Tensor] = field(default_factory=dict)
    rounded: dict[torch.dtype, Tensor] = field(default_factory=dict)

    @property
    def is_bridged(self) -> bool:
        return self.staged.device != self.summed.device

    def send(self) -> None:
        if self.is_bridged:
            self.summed.copy_(self.staged, non_blocking=self.staged.is_cuda)

    def receive(self) -> None:
        if self.is_bridged:
            self.staged.copy_(self.summed, non_blocking=self.staged.is_cuda)
        for dtype, section in self.sections.items():
            if self.rounded[dtype] is not section:
                self.rounded[dtype].copy_(section)


class GradientExchange:
    """Gradients of one step in flat wires: samples * gradient goes out, the mean by samples comes back.

    Parameters frozen when this is made take no part. A parameter without a gradient on some rank counts as zero there;
    without one on any rank its gradient stays None, so that optimizers skip it.
    """

    def __init__(
        self, arena: Arena, *, rank: int, world_size: int, num_facts: int, device: torch.device | str = "cpu"
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.num_facts = num_facts
        self.device = same_device(device, arena.device)
        self._arena_device = arena.device
        self._parameters = [parameter for parameter in arena.parameters if parameter.requires_grad]
        self._frozen = [parameter for parameter in arena.parameters if not parameter.requires_grad]
        self._tail = Tail(rank=rank, world_size=world_size, num_values=1 + num_facts)
        self._allocate()

    @property
    def maxima(self) -> list[Tensor]:
        """Nothing here takes a maximum."""
        return []

    @torch.no_grad()
    def pack(self, samples: int, facts: Sequence[float]) -> None:
        """Copy the gradients, times samples, with the facts and which parameters had one."""
        assert len(facts) == self.num_facts, f"{len(facts)} facts, {self.num_facts} expected"
        self._refuse_thawed()
        if samples:
            self._copy_gradients()
        for body in self._bodies:
            if samples:
                body.staged.mul_(samples)
            else:
                body.staged.zero_()
                self._own_presence.zero_()
            body.send()
        self._tail.encode([samples, *facts], self._tail.own_row(self._own_tail))
        self._slots.copy_(self._own_slots, non_blocking=True)
        if self._bodies[0].is_bridged and self._arena_device.type == "cuda":
            torch.cuda.current_stream(self._arena_device).synchronize()

    @torch.no_grad()
    def settle(self) -> Settled:
        """Divide by all samples and hand out the gradients; all ranks get the same."""
        share = self._tail.total_samples(self._slots[: self._tail.num_slots]).clamp(min=1.0).reciprocal()
        for body in self._bodies:
            body.summed.mul_(share)
            body.receive()
        slots = self._slots.cpu()
        self._hand_out(slots[self._tail.num_slots :])
        rows = self._tail.decode(slots[: self._tail.num_slots])
        total_samples = round(sum(row[0] for row in rows))
        return Settled(facts=tuple(tuple(row[1:]) for row in rows), total_samples=total_samples)

    def _copy_gradients(self) -> None:
        gradients = [_dense(parameter.grad) for parameter in self._parameters]
        present = [gradient for gradient in gradients if gradient is not None]
        if len(present) == len(gradients):
            self._own_presence.fill_(1.0)
            views = self._views
        else:
            self._own_presence.copy_(torch.tensor([gradient is not None for gradient in gradients]))
            views = [view for view, gradient in zip(self._views, gradients, strict=True) if gradient is not None]
            # Not the whole body: gradients that a user accumulates are views of it since the last average.
            torch._foreach_zero_(
                [view for view, gradient in zip(self._views, gradients, strict=True) if gradient is None]
            )
        if present:
            torch._foreach_copy_(views, present)

    def _hand_out(self, num_present: Tensor) -> None:
        for parameter, view, count in zip(self._parameters, self._results, num_present.tolist(), strict=True):
            parameter.grad = view if count else None

    def _refuse_thawed(self) -> None:
        for parameter in self._frozen:
            if parameter.grad is not None:
                raise ConfigError(
                    f"a frozen parameter of shape {tuple(parameter.shape)} got a gradient after training began",
                    hint="set requires_grad before training starts",
                )

    def _allocate(self) -> None:
        planner = Planner()
        places = [planner.place(parameter) for parameter in self._parameters]
        planner.align()
        num_slots = self._tail.num_slots + len(self._parameters)
        dtypes = sorted({wire_dtype(dtype) for dtype in planner.ends} or {torch.float32}, key=lambda d: -d.itemsize)
        self.wires: list[Tensor] = []
        self._bodies: list[_Body] = []
        for dtype in dtypes:
            lengths = {own: n for own, n in planner.ends.items() if wire_dtype(own) == dtype}
            num_body = sum(lengths.values())
            self.wires.append(self._buffer(num_body + (0 if self.wires else num_slots), dtype))
            self._bodies.append(self._body(self.wires[-1][:num_body], lengths))
        self._slots = self.wires[0][-num_slots:]
        self._own_slots = torch.zeros(num_slots, dtype=dtypes[0], pin_memory=self.device.type == "cuda")
        self._own_tail = self._own_slots[: self._tail.num_slots]
        self._own_presence = self._own_slots[self._tail.num_slots :]
        self._views = self._lay_out(places, {d: flat for body in self._bodies for d, flat in body.sections.items()})
        self._results = self._lay_out(places, {d: flat for body in self._bodies for d, flat in body.rounded.items()})

    def _buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        is_pinned = self._arena_device.type == "cuda" and self.device.type == "cpu"
        return torch.zeros(numel, dtype=dtype, device=self.device, pin_memory=is_pinned)

    def _body(self, summed: Tensor, lengths: dict[torch.dtype, int]) -> _Body:
        staged = summed if self.device == self._arena_device else torch.zeros_like(summed, device=self._arena_device)
        body = _Body(summed=summed, staged=staged)
        for dtype, section in zip(lengths, torch.split(staged, list(lengths.values())), strict=True):
            body.sections[dtype] = section
            body.rounded[dtype] = section if dtype == section.dtype else torch.zeros_like(section, dtype=dtype)
        return body

    def _lay_out(self, places: list[Place], flats: dict[torch.dtype, Tensor]) -> list[Tensor]:
        return [place.view(flats[place.dtype]) for place in places]


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
