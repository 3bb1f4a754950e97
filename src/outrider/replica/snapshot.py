"""A replica as it is, to go back to after steps that were only tried.

Decides what such steps may have changed: parameters, buffers, optimizer state, random states, attributes of modules.
Called where an execution is rehearsed.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from outrider.replica.replica import Replica

_REGISTRIES = ("_parameters", "_buffers", "_modules")


class Snapshot:
    """Taken when made; `restore` may be called more than once."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._flats = {dtype: flat.clone() for dtype, flat in replica.arena.flats.items()}
        self._integers = [tensor.clone() for tensor in replica.arena.integers]
        self._optimizer_state = _copied(replica.optimizer.state)
        self._attributes = {module: _attributes(module) for module in replica.model.modules()}
        self._steps = replica.steps
        self._random = HostRandomness()
        self._device_random = _device_random(replica.device)

    @torch.no_grad()
    def restore(self) -> None:
        replica = self._replica
        replica.arena.reclaim()
        for dtype, flat in replica.arena.flats.items():
            flat.copy_(self._flats[dtype])
        for tensor, kept in zip(replica.arena.integers, self._integers, strict=True):
            tensor.copy_(kept)
        replica.optimizer.zero_grad(set_to_none=True)
        replica.optimizer.state.clear()
        replica.optimizer.state.update(_copied(self._optimizer_state))
        for module, attributes in self._attributes.items():
            module.__dict__.update(attributes)
        replica.steps = self._steps
        self._random.restore()
        if self._device_random is not None:
            torch.cuda.set_rng_state(self._device_random, replica.device)


class HostRandomness:
    """The random states of the host: torch's, Python's, and numpy's where it is loaded."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state(legacy=False) if numpy is not None else None

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def was_drawn_from(self) -> bool:
        """Whether any of them has moved since."""
        now = HostRandomness()
        is_same = torch.equal(now._torch, self._torch) and now._python == self._python
        return not (is_same and repr(now._numpy) == repr(self._numpy))


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Tensors and numbers in an attribute of a module."""

    values: list[Any]

    def is_same(self, other: Kept) -> bool:
        """Tensors are the same by who they are, numbers by their value."""
        if len(self.values) != len(other.values):
            return False
        return all(_is_same(mine, its) for mine, its in zip(self.values, other.values, strict=True))


def kept_between_steps(model: nn.Module) -> dict[str, Kept]:
    """What modules hold beside parameters and buffers, by the name of the attribute."""
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


def _device_random(device: torch.device) -> Tensor | None:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _copied(state: Any) -> dict[Any, Any]:
    """Tensors are cloned; parameters, which are the keys, stay who they are."""
    return {parameter: {key: _clone(value) for key, value in own.items()} for parameter, own in state.items()}


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
