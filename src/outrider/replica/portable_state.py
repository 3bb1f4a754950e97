"""Converts the state of optimizers and schedules: for checkpoints, for other ranks, and back onto a device.

Decides which objects a checkpoint can contain (host copies that `weights_only=True` can load), which may be sent to
another rank as JSON with tensors by shape, stride and dtype, and which settings of this run are kept on resume. All
other objects raise an error, so that no rank ever loads a pickle of another process. Called by checkpoints, by
`state_transfer` and by both kinds of replica.
"""

from __future__ import annotations

import collections
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from outrider.errors import ConfigError
from outrider.replica.capturable_optimizer import OptimizerForm

_SHARING_POLICIES = 'policy="sync" (or "balanced" in a Session)'
_TAG = "__outrider__"
"""Marks a dict that encodes an object of another type."""
_NUMBERS: dict[type, Callable[[Any], Any]] = {int: int, float: float, complex: complex, str: str, bytes: bytes}
_FACTORIES = {"list": list, "dict": dict, "set": set, "int": int, "float": float, "str": str}


def portable(state: Any, name: str = "state") -> Any:
    """A copy that shares no memory with the original: tensors on the host, numbers as Python numbers.

    Raises a ConfigError with the place and type of an object that could not be read back.
    """
    return _Copier().copy(state, name)


def restored(state: Any) -> Any:
    """Decode the result of `portable`."""
    if isinstance(state, dict):
        if _TAG in state:
            return _READERS[state[_TAG]](state)
        return _refilled(state, {restored(key): restored(value) for key, value in state.items()})
    if isinstance(state, (list, tuple)) and not isinstance(state, torch.Size):
        return type(state)(restored(item) for item in state)
    return state


def num_bytes(state: Any) -> int:
    """Bytes of the tensors in a state."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(state) if isinstance(leaf, Tensor))


class _Copier:
    """Copies a state; a tensor that occurs twice is also one tensor in the copy."""

    def __init__(self) -> None:
        self._copies: dict[int, Tensor] = {}
        self._open: set[int] = set()

    def copy(self, value: Any, path: str) -> Any:
        if value is None or isinstance(value, (bool, bytearray, torch.dtype, torch.device, torch.Size)):
            return value
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.generic):
            return self.copy(_python_number(value), path)
        for kind, plain in _NUMBERS.items():
            if isinstance(value, kind):
                return plain(value)
        return self._container(value, path)

    def _tensor(self, tensor: Tensor, path: str) -> Tensor:
        # A copy also drops the rest of the storage if the tensor is a view.
        if id(tensor) not in self._copies:
            copy = tensor.detach().to("cpu", copy=True)
            if type(copy) is not Tensor and not _can_be_read(copy):
                raise _unreadable(path, tensor)
            self._copies[id(tensor)] = copy
        return self._copies[id(tensor)]

    def _container(self, value: Any, path: str) -> Any:
        if id(value) in self._open:
            raise _unreadable(path, value, "it contains itself")
        self._open.add(id(value))
        try:
            return self._copied_container(value, path)
        finally:
            self._open.discard(id(value))

    def _copied_container(self, value: Any, path: str) -> Any:
        if isinstance(value, np.ndarray):
            return self._array(value, path)
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            items = [self.copy(item, f"{path}.{key}") for key, item in zip(value._fields, value, strict=True)]
            return {_TAG: "namedtuple", "name": type(value).__name__, "fields": list(value._fields), "items": items}
        if isinstance(value, (list, tuple)):
            items = [self.copy(item, f"{path}[{number}]") for number, item in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, collections.deque):
            items = [self.copy(item, f"{path}[{number}]") for number, item in enumerate(value)]
            return {_TAG: "deque", "items": items, "maxlen": value.maxlen}
        if isinstance(value, (set, frozenset)):
            items = [self.copy(item, f"{path}{{{item!r}}}") for item in value]
            return {_TAG: "set" if isinstance(value, set) else "frozenset", "items": items}
        raise _unreadable(path, value)

    def _array(self, array: Any, path: str) -> dict[str, Any]:
        if array.dtype == object:
            return {_TAG: "object array", "items": self.copy(array.tolist(), path)}
        try:
            tensor = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
        except TypeError as error:
            raise _unreadable(path, array, f"its dtype is {array.dtype}") from error
        return {_TAG: "array", "tensor": tensor}

    def _mapping(self, mapping: Mapping[Any, Any], path: str) -> dict[Any, Any]:
        items = {
            self.copy(key, f"{path} (key {key!r})"): self.copy(value, f"{path}[{key!r}]")
            for key, value in mapping.items()
        }
        if isinstance(mapping, collections.defaultdict) and mapping.default_factory is not None:
            factory = getattr(mapping.default_factory, "__name__", "")
            if _FACTORIES.get(factory) is not mapping.default_factory:
                raise _unreadable(path, mapping, f"its default_factory is {mapping.default_factory!r}")
            return {_TAG: "defaultdict", "factory": factory, "items": items}
        if isinstance(mapping, collections.Counter):
            return collections.Counter(items)
        return collections.OrderedDict(items) if isinstance(mapping, collections.OrderedDict) else items


def _can_be_read(tensor: Tensor) -> bool:
    """Whether torch can load a tensor subclass: only if its package registered it as safe."""
    file = io.BytesIO()
    try:
        torch.save(tensor, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:
        return False
    return True


def _python_number(value: Any) -> Any:
    item = value.item()
    # A long double has no counterpart in Python and is not converted.
    if isinstance(item, np.generic):
        return complex(item) if isinstance(item, np.complexfloating) else float(item)
    return item


def _unreadable(path: str, value: Any, why: str | None = None) -> ConfigError:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    reason = f", {why}" if why else ""
    return ConfigError(
        f"{path} is a {name}{reason}, which a checkpoint cannot hold",
        hint="state_dict() of the optimizer or schedule must return numbers, text, tensors, and lists or dicts of "
        "these; override state_dict() and load_state_dict() to leave out the rest",
    )


def _refilled(kind: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if isinstance(kind, collections.Counter):
        return collections.Counter(items)
    return collections.OrderedDict(items) if isinstance(kind, collections.OrderedDict) else items


def _read_namedtuple(state: dict[str, Any]) -> Any:
    # The class itself cannot be loaded; a new class with the same name and fields replaces it.
    kind = collections.namedtuple(state["name"], state["fields"])  # type: ignore[misc]
    return kind(*(restored(item) for item in state["items"]))


def _read_object_array(state: dict[str, Any]) -> Any:
    return np.array(restored(state["items"]), dtype=object)


_READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "array": lambda state: state["tensor"].numpy(),
    "object array": _read_object_array,
    "namedtuple": _read_namedtuple,
    "deque": lambda state: collections.deque((restored(item) for item in state["items"]), state["maxlen"]),
    "set": lambda state: {restored(item) for item in state["items"]},
    "frozenset": lambda state: frozenset(restored(item) for item in state["items"]),
    "defaultdict": lambda state: collections.defaultdict(
        _FACTORIES[state["factory"]], {restored(key): restored(value) for key, value in state["items"].items()}
    ),
}


State = dict[int, dict[str, Any]]
"""An optimizer's state, by the number of the parameter."""


@dataclass(frozen=True, slots=True)
class TensorForm:
    """A placeholder for a tensor in a manifest; its values are sent separately."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def write_manifest(state: State) -> bytes:
    """Describe a state without the values of its tensors."""
    for number in state:
        if not isinstance(number, int):
            raise ConfigError(
                f"the optimizer keeps state under {number!r}, not a parameter: other ranks cannot take it over",
                hint=f"keep it in the state of a parameter, or pass {_SHARING_POLICIES}",
            )
    entries = [
        [number, [[key, _encode(value, name=key, number=number)] for key, value in entry.items()]]
        for number, entry in state.items()
    ]
    return json.dumps(entries).encode()


def read_manifest(manifest: bytes) -> State:
    """Rebuild the described state, with a `TensorForm` for every tensor."""
    return {number: {key: _decode(value) for key, value in entry} for number, entry in json.loads(manifest)}


def _encode(value: object, *, name: str, number: int) -> Any:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": [list(value.shape), list(value.stride()), dtype]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    # Named tuples and other subclasses would be rebuilt as another type.
    if type(value) in (list, tuple):
        parts = [_encode(part, name=name, number=number) for part in value]  # type: ignore[attr-defined]
        return parts if isinstance(value, list) else {"tuple": parts}
    if type(value) is dict and all(type(key) in (int, str) for key in value):
        return {"dict": [[key, _encode(part, name=name, number=number)] for key, part in value.items()]}
    raise ConfigError(
        f"the optimizer keeps an object of type {type(value).__name__} in {name!r} of parameter {number}, "
        "which cannot be handed to other ranks",
        hint=f"keep tensors, numbers, text, lists and dicts in its state, or pass {_SHARING_POLICIES}",
    )


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(part) for part in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        shape, stride, dtype = value["tensor"]
        return TensorForm(torch.Size(shape), tuple(stride), _dtype(dtype))
    if "tuple" in value:
        return tuple(_decode(part) for part in value["tuple"])
    return {key: _decode(part) for key, part in value["dict"]}


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"unknown dtype {name!r} in a hand-over", hint="use the same version of torch in all ranks")
    return found


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load the state to the device of each parameter, keeping this run's form (fused, foreach, capturable)."""
    form = OptimizerForm(optimizer)
    places = [_tensor_devices(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    for group, devices in zip(optimizer.param_groups, places, strict=True):
        for key, value in group.items():
            if isinstance(value, Tensor):
                group[key] = value.to(devices.get(key, value.device))
    form.restore()


def _tensor_devices(group: dict[str, Any]) -> dict[str, torch.device]:
    """The device of hyperparameters that are tensors, such as a learning rate."""
    return {key: value.device for key, value in group.items() if isinstance(value, Tensor)}


_COMPARED = ("lr", "weight_decay", "momentum", "betas", "eps", "nesterov", "amsgrad")
_SCHEDULED = ("momentum", "betas")
"""Settings that some schedules change as well."""


def other_settings(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> list[str]:
    """Settings of an optimizer, in words, that a saved state is about to change."""
    found: dict[str, None] = {}
    for group, before in zip(optimizer.param_groups, saved["param_groups"], strict=False):
        is_scheduled = "initial_lr" in group and "initial_lr" in before
        for name in _COMPARED:
            key = "initial_lr" if name == "lr" and is_scheduled else name
            if key not in group or key not in before or (is_scheduled and name in _SCHEDULED):
                continue
            given, kept = _plain(group[key]), _plain(before[key])
            if given != kept:
                found[f"{name} {kept} (given: {given})"] = None
    return list(found)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else tuple(value) if isinstance(value, list) else value
