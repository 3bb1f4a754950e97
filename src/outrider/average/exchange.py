"""Decides what one rank contributes to an average, and what it makes of the sum.

Does not communicate: between pack and settle somebody sums the wires. Called by the averagers, the lab and the tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.average.arena import Arena
from outrider.average.counters import Counters
from outrider.average.facts import Settled, Tail, drift
from outrider.average.optimizer_state import OptimizerArena
from outrider.average.outer import Outer
from outrider.average.wire import NUM_PARTS, Wire, plan_wires
from outrider.errors import DataError

# Numbers of each row in front of the caller's facts: samples, ‖displacement‖², ‖parameters‖².
NUM_OWN = 3
# What is kept, at each average, of the samples that tell the ranks' shares.
RECENT = 0.9


class Exchange:
    """An average travels as the displacement since the last common point, `ref`, which is identical on all ranks.

    A rank contributes samples * (snapshot - ref); the sum over ranks divided by all samples moves `ref`. So what no
    rank changed stays exact, and the drift between ranks follows from the norms of the displacements.
    One average is snapshot, pack, the sum of `wires` and the maximum of `maxima` over ranks, settle, then load where
    no step was taken since the snapshot, or correct where steps were. `device` is where the arithmetic happens.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        rank: int,
        world_size: int,
        num_facts: int,
        outer: Outer | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        assert 0 <= rank < world_size, f"rank {rank} in a world of {world_size}"
        self.arena = arena
        self.rank = rank
        self.world_size = world_size
        self.num_facts = num_facts
        self.device = same_device(device, arena.device)
        self._outer = outer or Outer()
        self._optimizer: OptimizerArena | None = None
        self._tail = Tail(rank=rank, world_size=world_size, num_values=NUM_OWN + num_facts)
        self._counters = Counters(arena, device=self.device)
        self._recent_samples = torch.zeros(world_size, dtype=torch.float64, device=self.device)
        self._ahead = torch.zeros((), dtype=torch.float64, device=self.device)
        """How much of its velocity the common point is ahead of the average."""
        self._allocate()
        self.reset_ref()

    @property
    def wires(self) -> list[Tensor]:
        """What is summed over ranks."""
        return [part.summed for part in self.parts]

    @property
    def maxima(self) -> list[Tensor]:
        """What the maximum over ranks is taken of; empty for a model without integer buffers."""
        return [self._counters.maxima] if self._counters.maxima.numel() else []

    @torch.no_grad()
    def attach(self, optimizer: OptimizerArena) -> None:
        """Let optimizer state join from the next average on; all ranks attach before the same average."""
        kept = self.state_dict()
        self._optimizer = optimizer
        self._allocate()
        self.reset_ref()
        self.load_state_dict(kept)

    @torch.no_grad()
    def reset_ref(self) -> None:
        """The arena as it is becomes the common point: after a broadcast or a resume, when it is equal on all ranks."""
        self.snapshot()
        for part in self.parts:
            part.restart()

    def snapshot(self) -> None:
        """Copy the arena; done when this returns."""
        self.stage()
        self.fetch()
        if self.arena.device.type == "cuda":
            torch.cuda.current_stream(self.arena.device).synchronize()

    @torch.no_grad()
    def stage(self) -> None:
        """First half of a snapshot: a copy on the arena's device, in the order of its stream."""
        self.arena.reclaim()
        if self._optimizer is not None:
            self._optimizer.reclaim()
        for part in self.parts:
            part.stage()
        self._counters.stage()

    @torch.no_grad()
    def fetch(self) -> None:
        """Second half: bring that copy to the exchange's device, on the current stream."""
        for part in self.parts:
            part.fetch()
        self._counters.fetch()

    @torch.no_grad()
    def pack(self, samples: int, facts: Sequence[float]) -> None:
        """Fill the wires from the snapshot."""
        assert len(facts) == self.num_facts, f"{len(facts)} facts, {self.num_facts} expected"
        self._counters.pack()
        for part in self.parts:
            part.displace()
        self._pack_facts(samples, facts)
        for part in self.parts:
            part.scale(samples)

    def settle(self) -> Settled:
        """Take the summed wires to the new common point; all ranks get the same."""
        self.apply()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return self.read()

    @torch.no_grad()
    def apply(self) -> None:
        """First half of settle: everything that needs no number on the host."""
        self._report[: self._tail.num_slots].copy_(self.parts[0].slots)
        if self.world_size == 1 and not self._outer.has_velocity:
            for part in self.parts:
                part.apply_alone()
        else:
            self._apply_sum()
        if self._report_here is not self._report:
            self._report_here.copy_(self._report, non_blocking=True)

    def read(self) -> Settled:
        """Second half: what the ranks told each other; the report must have reached the host."""
        rows = self._tail.decode(self._report_here[: self._tail.num_slots])
        samples, displacements, norms, *_ = ([row[i] for row in rows] for i in range(NUM_OWN))
        concentration, *parts = self._report_here[self._tail.num_slots :].tolist()
        apart = drift(samples=samples, displacements=displacements, norms=norms, mean_displacement=math.fsum(parts))
        return Settled(
            facts=tuple(tuple(row[NUM_OWN:]) for row in rows),
            total_samples=round(sum(samples)),
            drift=apart if self.world_size > 1 else 0.0,
            effective_ranks=1 / concentration if concentration > 0 else 1.0,
        )

    @torch.no_grad()
    def prepare_correction(self) -> None:
        """First half of correct, between settle and the next snapshot: off the compute path where there is one."""
        for part in self.parts:
            part.prepare_correction()

    @torch.no_grad()
    def load(self) -> None:
        """The arena becomes the common point: bit-identical on all ranks."""
        for part in self.parts:
            part.load()
        self._counters.load()

    def correct(self) -> None:
        """Move the arena by (new ref - snapshot): the average, and every step since the snapshot."""
        self.prepare_correction()
        self.add_correction()

    @torch.no_grad()
    def add_correction(self) -> None:
        """Second half: one addition per dtype."""
        for part in self.parts:
            part.add_correction()
        self._counters.correct()

    def step_back(self) -> None:
        """From the outer step's look-ahead to the average itself; no average may be on its way."""
        self._shift(-self._ahead)

    def step_ahead(self) -> None:
        """Where training goes on after `step_back`."""
        self._shift(self._ahead)

    @torch.no_grad()
    def _shift(self, fraction: Tensor) -> None:
        self.arena.reclaim()
        for part in self.parts:
            part.shift(fraction)

    def state_dict(self) -> dict[str, Any]:
        """Common point, with that of attached optimizer state, outer velocity, and the samples that tell the shares."""
        return {
            "fingerprint": self.arena.fingerprint,
            "ref": {str(part.plan.dtype): part.ref.to("cpu", copy=True) for part in self.parts},
            "velocity": {
                str(part.plan.dtype): part.velocity.to("cpu", copy=True)
                for part in self.parts
                if part.velocity is not None
            },
            "recent_samples": self._recent_samples.to("cpu", copy=True),
            "ahead": self._ahead.item(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["fingerprint"] != self.arena.fingerprint:
            raise DataError(
                f"the saved average belongs to another model: layout {state['fingerprint']:012x}, "
                f"this model has {self.arena.fingerprint:012x}",
                hint="resume with the model that wrote the checkpoint",
            )
        for part in self.parts:
            dtype = str(part.plan.dtype)
            if dtype in state["ref"]:
                part.take_ref(state["ref"][dtype])
            # A run resumed with another outer optimizer starts it at rest.
            if part.velocity is not None and dtype in state["velocity"]:
                part.velocity.copy_(state["velocity"][dtype])
        if state["recent_samples"].numel() == self.world_size:
            self._recent_samples.copy_(state["recent_samples"])
        # Checkpoints that know nothing of it were taken ahead.
        self._ahead.fill_(state.get("ahead", 0.0))

    def _allocate(self) -> None:
        plans = plan_wires(self.arena, self._optimizer)
        slots = [self._tail.num_slots] + [0] * (len(plans) - 1)
        self.parts = [
            Wire(plan, arena_device=self.arena.device, device=self.device, num_slots=num_slots)
            for plan, num_slots in zip(plans, slots, strict=True)
        ]
        if self._outer.has_velocity:
            for part in self.parts:
                part.velocity = torch.zeros_like(part.ref[part.parameters])
        is_remote = self.device.type == "cuda"
        num_report = self._tail.num_slots + 1 + NUM_PARTS * len(plans)
        self._report = torch.zeros(num_report, dtype=torch.float64, device=self.device)
        self._report_here = torch.zeros(num_report, dtype=torch.float64, pin_memory=True) if is_remote else self._report
        self._row = torch.zeros(self._tail.num_values, 2, dtype=plans[0].dtype, pin_memory=is_remote)

    def _pack_facts(self, samples: int, facts: Sequence[float]) -> None:
        self._tail.encode([samples, 0.0, 0.0, *facts], self._row)
        slots = self.parts[0].slots
        row = self._tail.own_row(slots.zero_())
        row.copy_(self._row, non_blocking=True)
        displacement, norm = row[1, 0], row[2, 0]
        for part in self.parts:
            squares = part.squares()
            displacement.add_(squares[0])
            norm.add_(squares[1])

    def _apply_sum(self) -> None:
        samples = self._tail.samples(self.parts[0].slots)
        total = samples.sum()
        is_moving = (total > 0).double()
        # Over the last windows, so that a short last one, or a rank that ran dry, does not change the momentum.
        self._recent_samples.mul_(RECENT).add_(samples)
        share = self._recent_samples / self._recent_samples.sum().clamp(min=1e-9)
        concentration = share.square().sum()
        self._report[self._tail.num_slots].copy_(concentration)
        # Without samples nothing moves, and what was ahead stays so.
        self._ahead.mul_(1.0 - is_moving).add_(is_moving * self._outer.look_ahead(concentration))
        parts = torch.split(self._report[self._tail.num_slots + 1 :], NUM_PARTS)
        for part, own in zip(self.parts, parts, strict=True):
            part.apply(
                total=total.clamp(min=1.0),
                is_moving=is_moving,
                concentration=concentration,
                outer=self._outer,
                parts=own,
            )


def same_device(wanted: torch.device | str, arena_device: torch.device) -> torch.device:
    """`cuda` means the arena's own CUDA device."""
    device = torch.device(wanted)
    return arena_device if device.type == arena_device.type else device
