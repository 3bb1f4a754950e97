"""Transfers the state of one replica to another besides parameters: optimizers, steps, and that of a user's loop.

Writes existing tensors in place, because captured steps contain their addresses. Called after one rank has trained
alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from outrider.replica.capturable_optimizer import OptimizerForm
from outrider.replica.loop_state import refuse_other_groups
from outrider.replica.portable_state import State, TensorForm, read_manifest, write_manifest
from outrider.replica.rank_replica import RankReplica


@dataclass(frozen=True, slots=True)
class Cargo:
    """The transferred state: steps, a manifest, and the tensors in the order of the manifest."""

    steps: int
    manifest: bytes
    tensors: Sequence[Tensor]


_LOOP = -1
"""The number under which the state of a user's loop travels, beside those of parameters."""


def pack(replica: RankReplica, *, with_loop: bool = False) -> Cargo:
    """All state that steps change, except parameters, buffers and the schedule, which is a function of samples.

    `with_loop` for ranks on which a user's loop did not run.
    """
    state: State = {_LOOP: loop} if with_loop and (loop := replica.loop_state()) else {}
    for first, optimizer in _numbered(replica.optimizers):
        own = optimizer.state_dict()["state"].items()
        state |= {first + number if isinstance(number, int) else number: entry for number, entry in own}
    return Cargo(replica.steps, write_manifest(state), _tensors(state))


def refuse_immovable(replica: RankReplica) -> None:
    """Raise a ConfigError if an optimizer keeps state that cannot be transferred."""
    pack(replica)


def places(replica: RankReplica, manifest: bytes) -> list[Tensor]:
    """The destinations of a manifest's tensors: existing tensors, or new ones if the replica's state differs."""
    told = read_manifest(manifest)
    loop = told.pop(_LOOP, {})
    refuse_other_groups(replica.optimizers, loop)
    of_loop = _empty(loop)
    if _has_place(replica.optimizers, told):
        pairs = _pairs(replica.optimizers, told)
        return of_loop + [own[key] for own, entry in pairs for key in entry if _is_tensor(entry[key])]
    return of_loop + _empty(told)


@torch.no_grad()
def take_over(replica: RankReplica, cargo: Cargo, *, at: int) -> None:
    """Apply the state as if this replica had taken the steps; `at` is the world's samples at the last step."""
    state = _filled(read_manifest(cargo.manifest), cargo.tensors)
    loop = state.pop(_LOOP, {})
    if _has_place(replica.optimizers, state):
        _write(replica.optimizers, state)
    else:
        _replace(replica, state)
    if loop:
        replica.take_loop_state(loop, at=at)
    else:
        replica.follow_schedule(at)
    replica.steps = cargo.steps


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor | TensorForm)


def _tensors(state: Any) -> list[Any]:
    """All tensors, or their forms, in the order of the manifest."""
    return [leaf for leaf in tree_leaves(state) if _is_tensor(leaf)]


def _empty(told: Any) -> list[Tensor]:
    return [torch.empty_strided(form.shape, form.stride, dtype=form.dtype) for form in _tensors(told)]


def _filled(state: State, tensors: Sequence[Tensor]) -> State:
    """The same state with tensors in place of their forms."""
    assert len(_tensors(state)) == len(tensors), "every tensor of a manifest travels with it"
    rest = iter(tensors)
    filled: State = tree_map(lambda leaf: next(rest) if _is_tensor(leaf) else leaf, state)
    return filled


def _numbered(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[int, torch.optim.Optimizer]]:
    """Each optimizer with the number of its first parameter: parameters are numbered through all optimizers."""
    first = 0
    for optimizer in optimizers:
        yield first, optimizer
        first += sum(len(group["params"]) for group in optimizer.param_groups)


def _pairs(optimizers: Sequence[torch.optim.Optimizer], told: State) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of the optimizers' existing state of a parameter and the received state."""
    owners = [(one, p) for one in optimizers for group in one.param_groups for p in group["params"]]
    places = {number: owners[number] for number in told}
    return [(optimizer.state.get(p, {}), told[number]) for number, (optimizer, p) in places.items()]


def _has_place(optimizers: Sequence[torch.optim.Optimizer], told: State) -> bool:
    """Whether all tensors can be written in place; tensors inside lists and dicts are replaced."""
    num_outermost = sum(_is_tensor(value) for entry in told.values() for value in entry.values())
    if num_outermost != len(_tensors(told)):
        return False
    return all(_shape(own) == _shape(entry) for own, entry in _pairs(optimizers, told))


def _write(optimizers: Sequence[torch.optim.Optimizer], told: State) -> None:
    """Copy in place, unless the values were received in place."""
    for own, entry in _pairs(optimizers, told):
        for key, value in entry.items():
            if not isinstance(value, Tensor):
                own[key] = value
            elif own[key] is not value:
                own[key].copy_(value)


def _shape(state: dict[str, Any]) -> dict[str, Any]:
    return {key: (value.shape, value.dtype) if _is_tensor(value) else None for key, value in state.items()}


def _replace(replica: RankReplica, told: State) -> None:
    for first, optimizer in _numbered(replica.optimizers):
        stop = first + sum(len(group["params"]) for group in optimizer.param_groups)
        _load(optimizer, {number - first: entry for number, entry in told.items() if first <= number < stop})
    replica.forget_captures()


def _load(optimizer: torch.optim.Optimizer, told: State) -> None:
    form, groups = OptimizerForm(optimizer), list(optimizer.param_groups)
    # Loading may keep a reference to a tensor, which may belong to another replica.
    own = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, told)
    optimizer.load_state_dict({"state": own, "param_groups": optimizer.state_dict()["param_groups"]})
    # Loading makes new groups; a user's loop may hold the old ones.
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        group.update(loaded)
    optimizer.param_groups[:] = groups
    for state, entry in _pairs([optimizer], told):
        for key, value in entry.items():
            # torch casts floats to the type of their parameter, and treats strings as lists.
            has_tensors = any(map(_is_tensor, tree_leaves(value)))
            state[key] = tree_map(_as_sent, state[key], value) if has_tensors else value
    form.restore()


def _as_sent(loaded: Any, sent: Any) -> Any:
    """The value as it was sent: a momentum in float32 beside parameters in bfloat16 keeps its precision."""
    if not isinstance(sent, Tensor) or loaded.dtype == sent.dtype:
        return loaded
    return sent.to(loaded.device, copy=True)
