"""What a value looks like without its numbers, and what a module makes of such values.

Decides by running the module on fake tensors, which allocate and compute nothing; where a module cannot take these,
a copy of it runs on zeros. Called by `shapes`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from outrider.errors import OutriderError
from outrider.flow.draft import Fault
from outrider.flow.trees import leaves, map_leaves
from outrider.flow.wired import states_in


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape, type and device of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        return "×".join(str(size) for size in self.shape) if self.shape else "scalar"

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


class Unknown:
    """A value of which nothing is known, because what makes it failed."""


UNKNOWN = Unknown()


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """What a module gave, what its inner modules gave by path, and what went wrong."""

    result: Any
    inner: Mapping[str, Any] = field(default_factory=dict)
    fault: Fault | None = None


def spec_tree(value: Any) -> Any:
    """The same value with specs in place of tensors."""
    return map_leaves(
        lambda leaf: Spec(tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf, value
    )


def describe(tree: Any) -> str:
    """A value for people: 8×16×32×32, (8×16, 8×16), or the type of what is no tensor."""
    if isinstance(tree, list | tuple):
        return f"({', '.join(describe(branch) for branch in tree)})"
    if isinstance(tree, dict):
        return f"({', '.join(f'{key}: {describe(branch)}' for key, branch in tree.items())})"
    return str(tree) if isinstance(tree, Spec) else type(tree).__name__


def evaluate(target: Callable[..., Any], arguments: Sequence[Any]) -> Evaluated:
    """What a module or a function makes of values that are given as specs."""
    try:
        return _evaluate_fake(target, arguments)
    except Exception:  # the module may fail, or only dislike fake tensors: zeros tell which
        pass
    try:
        return _evaluate_zeros(target, arguments)
    except Exception as error:
        return Evaluated(result=UNKNOWN, fault=_fault_of(target, arguments, error))


def _evaluate_fake(target: Callable[..., Any], arguments: Sequence[Any]) -> Evaluated:
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        values = map_leaves(_zeros_of, list(arguments))
        if not isinstance(target, nn.Module):
            return Evaluated(result=spec_tree(target(*values)))
        tensors = {**dict(target.named_parameters()), **dict(target.named_buffers())}
        fakes = {name: torch.empty_like(tensor, device=tensor.device) for name, tensor in tensors.items()}
        with _inner_results(target) as inner, _states_untouched(target):
            result = spec_tree(functional_call(target, fakes, tuple(values)))
    return Evaluated(result=result, inner=inner)


def _evaluate_zeros(target: Callable[..., Any], arguments: Sequence[Any]) -> Evaluated:
    values = map_leaves(_zeros_of, list(arguments))
    devices = {leaf.device for leaf in leaves(values) if isinstance(leaf, Tensor) and leaf.is_cuda}
    with torch.no_grad(), torch.random.fork_rng(devices=list(devices)):
        if not isinstance(target, nn.Module):
            return Evaluated(result=spec_tree(target(*values)))
        twin = copy.deepcopy(target)
        with _inner_results(twin) as inner:
            return Evaluated(result=spec_tree(twin(*values)), inner=inner)


def _zeros_of(leaf: Any) -> Any:
    return leaf.zeros() if isinstance(leaf, Spec) else leaf


@contextmanager
def _inner_results(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Collect what every module inside gives."""
    results: dict[str, Any] = {}
    handles = [
        part.register_forward_hook(lambda _m, _i, output, path=path: results.update({path: spec_tree(output)}))
        for path, part in module.named_modules()
        if path
    ]
    try:
        yield results
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _states_untouched(module: nn.Module) -> Iterator[None]:
    """Fake tensors must not stay behind in the states of nested flows."""
    before = [(state, state.value) for state in states_in(module)]
    try:
        yield
    finally:
        for state, value in before:
            state.value = value


def _fault_of(target: Callable[..., Any], arguments: Sequence[Any], error: Exception) -> Fault:
    if isinstance(error, OutriderError):
        return Fault(error.message, error.hint or "see the message")
    name = type(target).__name__ if isinstance(target, nn.Module) else getattr(target, "__name__", "a function")
    given = ", ".join(describe(argument) for argument in arguments)
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    return Fault(f"{name} fails on {given}: {first_line}", "check the sizes on both sides of this node")
