"""Specs of values (shape and dtype without data), and the effect of modules on them.

Decides how many inputs a module can take and what it returns. Called by name resolution and shape inference.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from outrider.errors import OutriderError
from outrider.flow.blocks import Call, function_name
from outrider.flow.draft import Draft, Mistake
from outrider.flow.emit import states_in


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
    """An unknown value, because the node that computes it failed."""


UNKNOWN = Unknown()


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """The outputs of a module, the outputs of its inner modules by path, and the error, if any."""

    result: Any
    inner: Mapping[str, Any] = field(default_factory=dict)
    fault: Mistake | None = None


def spec_tree(value: Any) -> Any:
    """The same value with specs in place of tensors."""
    return tree_map(
        lambda leaf: Spec(tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf, value
    )


def describe(tree: Any) -> str:
    """A value as text: 8×16×32×32, (8×16, 8×16), or the type of an object that is no tensor."""
    if isinstance(tree, list | tuple):
        return f"({', '.join(describe(branch) for branch in tree)})"
    if isinstance(tree, dict):
        return f"({', '.join(f'{key}: {describe(branch)}' for key, branch in tree.items())})"
    return str(tree) if isinstance(tree, Spec) else type(tree).__name__


def evaluate(target: Callable[..., Any], arguments: Sequence[Any]) -> Evaluated:
    """The outputs of a module or function for inputs that are given as specs."""
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
        values = tree_map(_zeros_of, list(arguments))
        if not isinstance(target, nn.Module):
            return Evaluated(result=spec_tree(target(*values)))
        tensors = {**dict(target.named_parameters()), **dict(target.named_buffers())}
        fakes = {name: torch.empty_like(tensor, device=tensor.device) for name, tensor in tensors.items()}
        with _inner_results(target) as inner, _states_untouched(target):
            result = spec_tree(functional_call(target, fakes, tuple(values)))
    return Evaluated(result=result, inner=inner)


def _evaluate_zeros(target: Callable[..., Any], arguments: Sequence[Any]) -> Evaluated:
    values = tree_map(_zeros_of, list(arguments))
    devices = {leaf.device for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_cuda}
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


def _fault_of(target: Callable[..., Any], arguments: Sequence[Any], error: Exception) -> Mistake:
    if isinstance(error, OutriderError):
        return Mistake(error.message, error.hint or "see the message")
    name = type(target).__name__ if isinstance(target, nn.Module) else getattr(target, "__name__", "a function")
    given = ", ".join(describe(argument) for argument in arguments)
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    return Mistake(f"{name} fails on {given}: {first_line}", "check the sizes on both sides of this node")


_ONLY_STREAM = ("skip", "experts", "branches")
"""Parts that see the stream but not the tags given with `using`."""


@dataclass(frozen=True, slots=True)
class Arity:
    """The number of inputs of a module; no limit if most is None."""

    least: int
    most: int | None

    def accepts(self, count: int) -> bool:
        return self.least <= count and (self.most is None or count <= self.most)

    def __str__(self) -> str:
        if self.most is None:
            return f"at least {self.least} input{'' if self.least == 1 else 's'}"
        if self.least == self.most:
            return f"{self.least} input{'' if self.least == 1 else 's'}"
        return f"{self.least} to {self.most} inputs"


def fault_of_calls(draft: Draft, parts: Mapping[str, nn.Module], num_takes: int) -> Iterator[Mistake]:
    """A fault for every part that is fed a wrong number of inputs."""
    for part, module in parts.items():
        count = num_takes if part.startswith(_ONLY_STREAM) else num_takes + len(draft.uses)
        arity = arity_of(module)
        if arity is not None and not arity.accepts(count):
            yield _fault(module, arity, count, draft)


def arity_of(module: nn.Module) -> Arity | None:
    """The positional inputs of a module's forward; None if Python cannot determine them."""
    call = module.function if isinstance(module, Call) else module.forward
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    has_rest = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return Arity(sum(p.default is p.empty for p in positional), None if has_rest else len(positional))


def _fault(module: nn.Module, arity: Arity, count: int, draft: Draft) -> Mistake:
    name = function_name(module.function) if isinstance(module, Call) else type(module).__name__
    fed = ", ".join(["the stream", *(repr(tag) for tag in draft.uses)])
    way_out = "feed the rest with using(...)" if count < arity.least else "leave some out of using(...)"
    if draft.kind == "merge":
        fed, way_out = f"{len(draft.takes)} streams, {len(draft.uses)} tags", "give a function of as many inputs"
    return Mistake(f"{name} takes {arity}, the flow feeds it {count} ({fed})", way_out)
