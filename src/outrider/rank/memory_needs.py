"""Computes the memory that a run needs on each rank before training, and rejects a run that cannot fit.

Decides from what is certain: gradients, optimizer state, averages. Activations come on top; they are known only after
the first step, and micro-batches make them smaller. Called by `RankLife` on every rank before averages are allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider.average.average_memory import AverageBytes, average_bytes
from outrider.average.gradient_average import are_in_pieces
from outrider.errors import DeviceError
from outrider.record.disk_space import in_units
from outrider.replica.optimizer_memory import present_bytes, state_bytes
from outrider.replica.portable_state import num_bytes
from outrider.replica.rank_replica import RankReplica
from outrider.world.memory_limit import available_memory
from outrider.world.world import World

WORTH_TELLING = 10**9
"""If a rank needs at least this many bytes, the line at the start of a run tells how many it needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNeeds:
    """Bytes of one rank on its device, without activations and data."""

    device: str
    place: str
    """Host and device. Ranks of the same place share the memory available there, unless they have limits."""
    model: int
    gradients: int
    optimizer: int | None
    """None if the state of the optimizer class is not known."""
    optimizer_there: int
    """The part of `optimizer` that is already allocated."""
    averages: int
    later: int
    """The part of `averages` that is allocated during training: snapshots, and optimizer state at the first average."""
    saved_by_cadence: int
    """Additional bytes of background averages, compared with blocking ones."""
    saved_without_outer: int
    available: int | None
    """Bytes available besides the model, which is already there; None if unknown."""
    has_limit: bool

    @property
    def more(self) -> int:
        """Bytes still to be allocated."""
        return self.gradients + max(0, (self.optimizer or 0) - self.optimizer_there) + self.averages

    @property
    def total(self) -> int:
        return self.model + self.optimizer_there + self.more


def needs_of(replica: RankReplica, world: World) -> MemoryNeeds:
    """The needs of this rank; only its model is on its device so far."""
    recipe, spec = replica.recipe, world.spec
    kept = average_bytes(
        replica.arena,
        recipe.policy_spec,
        outer=replica.compensation.outer,
        wire=recipe.wire,
        world_size=world.size,
        in_pieces=are_in_pieces(replica.arena, is_on_cpus=world.is_on_cpus, is_one_host=world.is_one_host),
    )
    states = [state_bytes(optimizer) for optimizer in replica.optimizers]
    state = None if None in states else sum(one for one in states if one is not None)
    shared_state = _shared_state(kept, state or 0) if recipe.average_optimizer and world.size > 1 else 0
    return MemoryNeeds(
        device=str(spec),
        place=f"{world.hosts[world.rank]} {spec.torch_name}",
        model=num_bytes(replica.model.state_dict()),
        gradients=sum(parameter.nbytes for parameter in replica.arena.parameters),
        optimizer=state,
        optimizer_there=sum(present_bytes(optimizer) for optimizer in replica.optimizers),
        averages=kept.total + shared_state,
        later=kept.snapshot + shared_state,
        saved_by_cadence=kept.snapshot,
        saved_without_outer=kept.velocity,
        available=available_memory(spec),
        has_limit=spec.memory_bytes is not None,
    )


def _shared_state(kept: AverageBytes, state: int) -> int:
    """Averaged optimizer state also has a common point, and a snapshot if parameters have one."""
    return state * (2 if kept.snapshot else 1)


def agree_on_memory(replica: RankReplica, world: World) -> list[MemoryNeeds]:
    """The needs of all ranks; raises on all ranks if one cannot fit. All ranks call this."""
    own = needs_of(replica, world)
    told = world.exchange_json(asdict(own), name="memory needs", what="the memory that each rank needs")
    needs = [MemoryNeeds(**fields) for fields in told]
    refuse_too_large(needs)
    return needs


def refuse_too_large(needs: Sequence[MemoryNeeds]) -> None:
    """Raise if a rank, or the ranks that share a device, need more memory than available."""
    for rank, own in enumerate(needs):
        if own.available is None:
            continue
        sharing = [own] if own.has_limit else [one for one in needs if one.place == own.place and not one.has_limit]
        if sum(one.more for one in sharing) > own.available:
            raise _too_large(rank, own, num_sharing=len(sharing))


def _too_large(rank: int, own: MemoryNeeds, *, num_sharing: int) -> DeviceError:
    optimizer = "optimizer state unknown" if own.optimizer is None else f"optimizer state {in_units(own.optimizer)}"
    beside = f", and {num_sharing} ranks share them" if num_sharing > 1 else ""
    assert own.available is not None
    return DeviceError(
        f"rank {rank} ({own.device}) needs {in_units(own.more)} beside its model of {in_units(own.model)}, before any "
        f"activation: gradients {in_units(own.gradients)}, {optimizer}, averages {in_units(own.averages)}; "
        f"{in_units(own.available)} are {'left of its limit' if own.has_limit else 'free'}{beside}",
        hint=_way_out(own),
        rank=rank,
    )


def _way_out(own: MemoryNeeds) -> str:
    ways = []
    if own.saved_by_cadence:
        ways.append(f'policy="cadence" needs {in_units(own.saved_by_cadence)} less')
    if own.saved_without_outer:
        ways.append(f'outer="none" needs {in_units(own.saved_without_outer)} less')
    if own.optimizer:
        ways.append("an optimizer with less state, or fewer trained parameters (requires_grad_(False)), needs less")
    ways.append("raise the limit of the device" if own.has_limit else "use a device with more memory")
    return "; ".join(ways)


def memory_event(own: MemoryNeeds) -> dict[str, Any]:
    """For the timeline."""
    names = ("model", "gradients", "optimizer", "averages", "available", "total")
    return {"value": own.total, **{f"{name}_bytes": getattr(own, name) for name in names}}


def memory_words(needs: Sequence[MemoryNeeds]) -> str | None:
    """For the line at the start of a run; None for small models."""
    if max(one.total for one in needs) < WORTH_TELLING:
        return None
    totals = list(dict.fromkeys(in_units(one.total) for one in needs))
    return f"{' and '.join(totals)} of memory per rank before activations"
