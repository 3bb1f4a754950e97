"""A snapshot of a replica, to restore it after trial steps.

Decides what such steps may have changed: parameters, buffers, optimizer state, random state, attributes of modules. The
snapshot is in host memory, so that trial steps have as much device memory as steps in training. Called by `trial_steps`
and by the search for a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from outrider.average.resting import RestingCopy
from outrider.data import randomness

if TYPE_CHECKING:
    from outrider.replica.replica import Replica

_REGISTRIES = ("_parameters", "_buffers", "_modules")


class Snapshot:
    """A snapshot taken at creation; `restore` may be called more than once."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._flats = {dtype: _on_host(flat) for dtype, flat in replica.arena.flats.items()}
        self._integers = [_on_host(tensor) for tensor in replica.arena.integers]
        self._resting = RestingCopy(replica.arena.layout.resting)
        self._optimizer_state = {
            parameter: {key: _Entry.of(value) for key, value in own.items()}
            for parameter, own in replica.optimizer.state.items()
        }
        self._attributes = {module: _attributes(module) for module in replica.model.modules()}
        self._steps = replica.steps
        self._random = randomness.capture()
        self._device_random = randomness.device_state(replica.device)

    @torch.no_grad()
    def restore(self) -> None:
        replica = self._replica
        replica.arena.reclaim()
        for dtype, flat in replica.arena.flats.items():
            flat.copy_(self._flats[dtype])
        for tensor, kept in zip(replica.arena.integers, self._integers, strict=True):
            tensor.copy_(kept)
        self._resting.put_back()
        replica.optimizer.zero_grad(set_to_none=True)
        replica.optimizer.state.clear()
        for parameter, own in self._optimizer_state.items():
            replica.optimizer.state[parameter] = {key: entry.copied() for key, entry in own.items()}
        for module, attributes in self._attributes.items():
            module.__dict__.update(attributes)
        replica.steps = self._steps
        randomness.restore(self._random)
        if self._device_random is not None:
            randomness.restore_device(replica.device, self._device_random)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Tensors and numbers in an attribute of a module."""

    values: list[Any]

    def is_same(self, other: Kept) -> bool:
        """Compare tensors by identity, numbers by value."""
        if len(self.values) != len(other.values):
            return False
        return all(_is_same(mine, its) for mine, its in zip(self.values, other.values, strict=True))


def kept_between_steps(model: nn.Module) -> dict[str, Kept]:
    """The attributes of modules other than parameters and buffers, by name."""
    return {
        f"{name}.{key}" if name else key: Kept(values=[leaf for leaf in pytree.tree_leaves(value) if _is_kept(leaf)])
        for name, module in model.named_modules()
        for key, value in _attributes(module).items()
    }


def _is_kept(leaf: Any) -> bool:
    return isinstance(leaf, Tensor | int | float) and not isinstance(leaf, bool)


def _is_same(mine: Any, its: Any) -> bool:
    return mine is its if isinstance(mine, Tensor) or isinstance(its, Tensor) else bool(mine == its)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if key not in _REGISTRIES}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """A value in an optimizer's state: tensors are copied, other values kept as they are."""

    value: Any
    device: torch.device | None = None

    @classmethod
    def of(cls, value: Any) -> _Entry:
        return cls(value=_on_host(value), device=value.device) if isinstance(value, Tensor) else cls(value=value)

    def copied(self) -> Any:
        return self.value if self.device is None else self.value.to(self.device, copy=True)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
