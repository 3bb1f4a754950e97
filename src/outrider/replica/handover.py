"""Brings a replica to where another stands beside its parameters: the state of the optimizer, and the steps it took.

Decides that what is there is written in place, since captured steps know it by its address. Called where one rank
worked alone.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.replica.rates import OptimizerForm
from outrider.replica.replica import Replica

State = dict[int, dict[str, Any]]
"""An optimizer's state, by the number of the parameter."""


class _Hollow(NamedTuple):
    """Stands for a tensor in a manifest: its numbers travel by themselves."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Cargo:
    """What one replica hands to another: its steps, a manifest, and the tensors that it speaks of, in its order."""

    steps: int
    manifest: bytes
    tensors: Sequence[Tensor]


def pack(replica: Replica) -> Cargo:
    """Everything that its steps changed beside parameters, buffers and the schedule, which follows the samples."""
    state: State = replica.optimizer.state_dict()["state"]
    hollow = _changed(state, lambda tensor: _Hollow(tensor.shape, tensor.stride(), tensor.dtype))
    return Cargo(replica.steps, pickle.dumps(hollow), list(_tensors(state)))


def places(replica: Replica, manifest: bytes) -> list[Tensor]:
    """Where the tensors of a manifest belong: in what is there, or in new ones where the replica has another state."""
    told: State = pickle.loads(manifest)
    if _has_place(replica.optimizer, told):
        return [own[key] for own, entry in _pairs(replica.optimizer, told) for key in _tensor_keys(entry)]
    return [torch.empty_strided(hollow.shape, hollow.stride, dtype=hollow.dtype) for hollow in _tensors(told)]


@torch.no_grad()
def take_over(replica: Replica, cargo: Cargo, *, at: int) -> None:
    """Go on as if this replica had taken those steps; `at` is the samples that the world had consumed at the last."""
    state: State = pickle.loads(cargo.manifest)
    for (entry, key), tensor in zip(_slots(state), cargo.tensors, strict=True):
        entry[key] = tensor
    if _has_place(replica.optimizer, state):
        _write(replica.optimizer, state)
    else:
        _replace(replica, state)
    replica.follow_schedule(at)
    replica.steps = cargo.steps


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor | _Hollow)


def _changed(state: State, change: Callable[[Tensor], Tensor | _Hollow]) -> State:
    return {
        number: {key: change(value) if isinstance(value, Tensor) else value for key, value in entry.items()}
        for number, entry in state.items()
    }


def _tensor_keys(entry: dict[str, Any]) -> list[str]:
    return [key for key, value in entry.items() if _is_tensor(value)]


def _slots(state: State) -> Iterator[tuple[dict[str, Any], str]]:
    for entry in state.values():
        for key in _tensor_keys(entry):
            yield entry, key


def _tensors(state: State) -> Iterator[Any]:
    for entry, key in _slots(state):
        yield entry[key]


def _pairs(optimizer: torch.optim.Optimizer, told: State) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What the optimizer has for a parameter, and what it is told."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [(optimizer.state.get(parameters[number], {}), entry) for number, entry in told.items()]


def _has_place(optimizer: torch.optim.Optimizer, told: State) -> bool:
    return all(_shape(own) == _shape(entry) for own, entry in _pairs(optimizer, told))


def _write(optimizer: torch.optim.Optimizer, told: State) -> None:
    """In place; what arrived there already stays."""
    for own, entry in _pairs(optimizer, told):
        for key, value in entry.items():
            if not isinstance(value, Tensor):
                own[key] = value
            elif own[key] is not value:
                own[key].copy_(value)


def _shape(state: dict[str, Any]) -> dict[str, Any]:
    return {key: (value.shape, value.dtype) if _is_tensor(value) else None for key, value in state.items()}


def _replace(replica: Replica, told: State) -> None:
    optimizer = replica.optimizer
    form = OptimizerForm(optimizer)
    # Loading may keep a tensor as it is, and this one may be another replica's.
    own = _changed(told, Tensor.clone)
    optimizer.load_state_dict({"state": own, "param_groups": optimizer.state_dict()["param_groups"]})
    form.restore()
    replica.forget_captures()
