"""Detects that tensors of this rank's model were frozen, thawed or changed, and agrees with the other ranks.

Decides when the layout of averages changes: between two segments, on all ranks alike. If needed, a segment is cut short
for that. Called by the averages of a rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from outrider.average.arena import Arena
from outrider.average.arena_layout import Tenant
from outrider.average.resting import RestingWatch
from outrider.errors import ConfigError
from outrider.replica.rank_replica import RankReplica
from outrider.world.world import World

PATIENCE = 16
"""If a parameter stops requiring gradients within a loop, it counts as frozen after this many batches without one.
The halves of a GAN require gradients in turns, one of them perhaps only in every fifth batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutSizes:
    """Sizes of what takes part in averages, and of what does not."""

    trained: int
    """Elements of trained parameters."""
    resting: int
    """Elements of all tensors that take no part."""
    bytes: int
    """Bytes that one average of parameters sends: trained parameters, buffers, counters and facts."""
    gradient_bytes: int
    """Bytes that one average of gradients sends."""


def sizes_of(arena: Arena, *, num_bytes: int = 0, gradient_bytes: int = 0) -> LayoutSizes:
    return LayoutSizes(
        trained=sum(parameter.numel() for parameter in arena.parameters),
        resting=sum(tensor.numel() for tensor in arena.resting),
        bytes=num_bytes,
        gradient_bytes=gradient_bytes,
    )


NAMES_TOLD = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class NewLayout:
    """The layout that all ranks agreed on."""

    thawed: tuple[str, ...]
    frozen: tuple[str, ...]
    changing: tuple[str, ...]
    """Tensors at rest that were now seen to change."""
    trained: tuple[str, ...]
    """All parameters trained from now on."""

    @property
    def is_new(self) -> bool:
        return bool(self.thawed or self.frozen or self.changing)

    @property
    def told(self) -> dict[str, list[str]]:
        """For the timeline: the first names of each."""
        lists = {"thawed": self.thawed, "frozen": self.frozen, "changing": self.changing}
        return {kind: list(names[:NAMES_TOLD]) for kind, names in lists.items() if names}


class LayoutWatch:
    """Watches the model of one rank; `world` is None if the rank is alone."""

    def __init__(self, replica: RankReplica, world: World | None) -> None:
        self._replica = replica
        self._world = world
        self._num_steps = 0
        self._idle: dict[str, int] = {}
        """Batches without a gradient, for parameters that currently require none."""
        self._off_at_end: set[str] = set()
        """Parameters that required no gradient when the last segment ended."""
        self._told: tuple[set[str], set[str]] = set(), set()
        """Parameters that this rank had thawed and frozen when the ranks last agreed."""
        self._seen: set[str] = set()
        self._with_gradient: set[str] = set()
        if world is not None:
            _check_layouts(replica, world)
        self.restart()

    def restart(self) -> None:
        """Take the tensors at rest as the new reference; they are equal on all ranks."""
        layout = self._replica.arena.layout
        # A single rank averages with nobody, so no change of a tensor needs attention.
        self._resting = RestingWatch(() if self._world is None else layout.resting)
        self._names = {
            id(tenant.tensor): tenant.name
            for region in layout.regions
            for tenant in region.tenants
            if tenant.is_trained
        }
        self._known_names = {id(p): name for name, p in self._replica.model.named_parameters()}
        self._seen.clear()
        self._idle.clear()

    # In a segment

    def saw_gradients(self) -> None:
        """Record which parameters have gradients; called just before an optimizer steps: users may drop them later."""
        if self._idle:
            self._with_gradient |= {
                self._names[id(one)]
                for one in self._replica.arena.parameters
                if one.requires_grad or one.grad is not None
            }

    def stepped(self) -> None:
        """Count a batch of this rank; called after each."""
        self._num_steps += 1
        if self._num_steps & (self._num_steps - 1) == 0:
            self._seen |= self._changed(is_thorough=False)
        if self._idle:
            self.saw_gradients()
            self._idle = {name: 0 if name in self._with_gradient else n + 1 for name, n in self._idle.items()}
            self._with_gradient.clear()

    def wants_change(self, *, is_thorough: bool = False) -> bool:
        """Whether this rank's model no longer fits the layout; the segment should then end at the next average.

        With `is_thorough` all tensors at rest are compared now, as between two segments.
        """
        if is_thorough:
            self._refuse_strangers()
            self._seen |= self._changed(is_thorough=True)
        self._idle = {name: self._idle.get(name, 0) for name, _ in self._off()}
        # A change that other ranks have not made yet must wait for them: they reach that batch later.
        thawed, frozen = self._told
        return bool(self._seen) or not (set(self._thawed()) <= thawed and set(self._patient()) <= frozen)

    def _patient(self) -> list[str]:
        return sorted(name for name, batches in self._idle.items() if batches >= PATIENCE)

    # Between two segments

    def ended(self) -> None:
        """Note the end of a segment. A loop may thaw again what it froze; what is frozen after this stays frozen."""
        self._off_at_end = {name for name, _ in self._off()}

    def agree(self, *, is_within_pass: bool) -> NewLayout:
        """Agree on the changes of all ranks; all ranks call this.

        Within a pass, ranks are at different batches, so what one of them froze or thawed waits for the others.
        Between two passes, a difference is an error.
        """
        self._refuse_strangers()
        self._seen |= self._changed(is_thorough=True)
        off = sorted(name for name, _ in self._off())
        idle = [name for name in off if name not in self._off_at_end or self._idle.get(name, 0) >= PATIENCE]
        own = {"thawed": sorted(self._thawed()), "off": off, "idle": idle, "seen": sorted(self._seen)}
        self._told = set(own["thawed"]), set(idle)
        told = [own]
        if self._world is not None:
            told = self._world.exchange_json(own, name="layouts", what="the layout of averages")
        if not is_within_pass:
            _compare([one["thawed"] for one in told], verb="was thawed")
            _compare([one["off"] for one in told], verb="was frozen")
        thawed = set.intersection(*(set(one["thawed"]) for one in told))
        off_on_all = set.intersection(*(set(one["off"]) for one in told))
        frozen = off_on_all & set().union(*(one["idle"] for one in told))
        seen = set().union(*(one["seen"] for one in told)) - thawed
        return NewLayout(
            thawed=tuple(sorted(thawed)),
            frozen=tuple(sorted(frozen)),
            changing=tuple(sorted(seen)),
            trained=tuple(sorted((set(self._names.values()) - frozen) | thawed)),
        )

    def _refuse_strangers(self) -> None:
        """Raise if the model has parameters that the run did not begin with: nobody would average them."""
        if self._world is None:
            return
        for name, parameter in self._replica.model.named_parameters():
            if id(parameter) not in self._known_names:
                raise ConfigError(
                    f"the parameter {name} was added or replaced after the run began, so ranks would not share it",
                    hint="make it before train() or prepare() gets the model, and freeze it until it is needed; "
                    "to load values, use load_state_dict without assign=True",
                )

    def _changed(self, *, is_thorough: bool) -> set[str]:
        """Tensors at rest that have changed, without parameters that this rank thawed before the others."""
        thawed = set(self._thawed())
        return {one for one in self._resting.changed(is_thorough=is_thorough) if thawed.isdisjoint(one.split(" = "))}

    def _off(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Parameters in the layout that currently require no gradient."""
        return [(self._names[id(one)], one) for one in self._replica.arena.parameters if not one.requires_grad]

    def _thawed(self) -> list[str]:
        return [self._known_names[id(one)] for one in self._replica.arena.frozen if one.requires_grad]


def joins(tenant: Tenant, names: Collection[str]) -> bool:
    """Whether a tensor at rest is among `names`; a tied tensor has several names."""
    return tenant.name in names or any(name in names for name in tenant.name.split(" = "))


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def set_trained(model: nn.Module, trained: Iterable[str]) -> None:
    """Require gradients of only these parameters, as in a checkpoint; an entry may join names of a tied parameter."""
    wanted = {name for names in trained for name in names.split(" = ")}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad != (name in wanted):
            parameter.requires_grad_(name in wanted)


def _compare(lists: Sequence[Sequence[str]], *, verb: str) -> None:
    for rank, names in enumerate(lists):
        odd = sorted(set(names) ^ set(lists[0]))
        if odd:
            here, there = (rank, 0) if odd[0] in names else (0, rank)
            raise ConfigError(
                f"{odd[0]} {verb} on rank {here}, and not on rank {there}",
                hint="freeze and thaw the same parameters on all ranks, at the same place of the loop",
                rank=rank,
            )


def _check_layouts(replica: RankReplica, world: World) -> None:
    """Raise if layouts differ: flat arenas are summed by element, so parameters would be mixed up silently."""
    layouts = world.exchange_json(replica.arena.layout.agreement, name="layouts")
    if len(set(layouts)) == 1:
        return
    trained: list[list[str]] = world.exchange_json(replica.arena.layout.trained, name="trained parameters")
    for rank, names in enumerate(trained):
        odd = sorted(set(names) ^ set(trained[0]))
        if odd:
            here, there = (rank, 0) if odd[0] in names else (0, rank)
            raise ConfigError(
                f"{odd[0]} is trained on rank {here}, but not on rank {there}",
                hint="make the same model on every rank, and freeze the same parameters",
                rank=rank,
            )
    rank = next(rank for rank, layout in enumerate(layouts) if layout != layouts[0])
    raise ConfigError(
        f"rank {rank} made a model of another layout than rank 0 ({layouts[rank]:012x}, {layouts[0]:012x})",
        hint="make the same model on every rank: same modules, dtypes and memory formats",
        rank=rank,
    )
