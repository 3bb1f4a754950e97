"""The steps of a flow that are more than a call: repetition, mixture, routing, mapping.

Decides how each computes, and whether a module treats every sample alone, so that many calls may be one call with a
larger batch: by known types only; a module of your own says `treats_samples_alone = True`. Made by `Flow`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm

from outrider.errors import ConfigError

_LAYERS = (
    nn.Identity, nn.Linear, nn.Bilinear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.Unflatten,
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d,
    nn.Upsample, nn.PixelShuffle, nn.PixelUnshuffle, nn.ZeroPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d,
    nn.Dropout, nn.Dropout2d, nn.AlphaDropout,
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus,
    nn.Softsign, nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.LogSigmoid,
    nn.GRUCell, nn.RNNCell, nn.LSTMCell,
    nn.Sequential, nn.ModuleList, nn.ModuleDict,
)  # fmt: skip


def treats_samples_alone(module: nn.Module) -> bool:
    """Whether every part of a module treats the samples of a batch independently."""
    return all(_is_alone(part) for part in module.modules())


def mixes_samples(module: nn.Module) -> bool:
    """Whether statistics of the batch affect its samples, as in batch normalisation."""
    return any(isinstance(part, _BatchNorm) for part in module.modules())


def _is_alone(part: nn.Module) -> bool:
    if isinstance(part, nn.Flatten):
        return part.start_dim >= 1
    if isinstance(part, nn.Softmax | nn.LogSoftmax):
        return part.dim not in (None, 0)
    return type(part) in _LAYERS or bool(getattr(part, "treats_samples_alone", False))


Condition = Callable[[Any], Any]


class Call(nn.Module):
    """A plain function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: Any) -> Any:
        return self.function(*values)

    def extra_repr(self) -> str:
        return function_name(self.function)


def function_name(function: Callable[..., Any]) -> str:
    """The name of a function, or of the class of a callable object."""
    return getattr(function, "__name__", type(function).__name__)


class Repeat(nn.Module):
    """The same module a fixed number of times."""

    treats_samples_alone = True

    def __init__(self, body: nn.Module, *, times: int) -> None:
        super().__init__()
        self.body = body
        self.times = times

    def forward(self, stream: Any, *further: Any) -> Any:
        for _ in range(self.times):
            stream = self.body(stream, *further)
        return stream

    def extra_repr(self) -> str:
        return f"times={self.times}"


class ConditionalRepeat(nn.Module):
    """The same module, as often as a condition says; a condition per sample stops each by itself."""

    def __init__(self, body: nn.Module, condition: Condition, *, at_most: int) -> None:
        super().__init__()
        self.body = body
        self.condition = condition
        self.at_most = at_most

    def extra_repr(self) -> str:
        return f"at_most={self.at_most}"


class RepeatUntil(ConditionalRepeat):
    """Until the condition holds, at least once."""

    def forward(self, stream: Any, *further: Any) -> Any:
        return repeat_until(self, stream, *further)


class RepeatWhile(ConditionalRepeat):
    """While the condition holds, perhaps never."""

    def forward(self, stream: Any, *further: Any) -> Any:
        return repeat_while(self, stream, *further)


def repeat_until(block: RepeatUntil, stream: Any, *further: Any) -> Any:
    """Advance, then ask; at most `block.at_most` times."""
    running: Tensor | None = None
    for _ in range(block.at_most):
        stream = _advance(block.body(stream, *further), stream, running)
        running = _both(running, ~_truth(block.condition(stream)))
        if not bool(running.any()):
            break
    return stream


def repeat_while(block: RepeatWhile, stream: Any, *further: Any) -> Any:
    """Ask, then advance; at most `block.at_most` times."""
    running: Tensor | None = None
    for _ in range(block.at_most):
        running = _both(running, _truth(block.condition(stream)))
        if not bool(running.any()):
            break
        stream = _advance(block.body(stream, *further), stream, running)
    return stream


def _truth(answer: Any) -> Tensor:
    return torch.as_tensor(answer).bool()


def _both(running: Tensor | None, answer: Tensor) -> Tensor:
    return answer if running is None else running & answer


def _advance(advanced: Any, stream: Any, running: Tensor | None) -> Any:
    """The advanced stream; samples that have stopped stay as they are."""
    if running is None or running.dim() == 0:
        return advanced
    return torch.where(_beside(running, advanced), advanced, stream)


def _beside(weights: Tensor, values: Tensor) -> Tensor:
    """Weights with as many trailing dimensions as it takes to multiply values."""
    return weights.reshape(*weights.shape, *[1] * (values.dim() - weights.dim()))


class Gate(nn.Module):
    """A soft mixture: the softmax of the router's scores weighs every expert's result."""

    treats_samples_alone = True

    def __init__(self, router: nn.Module, experts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.router = router
        self.experts = nn.ModuleList(experts)

    def forward(self, stream: Any, *further: Any) -> Any:
        scores = self.router(stream, *further)
        return mix(scores, [expert(stream) for expert in self.experts])


def mix(scores: Tensor, results: list[Tensor]) -> Tensor:
    """The sum of results, weighted by the softmax of scores along their last dimension."""
    _require_width(scores, len(results), "expert")
    weights = scores.softmax(-1)
    weighted = [_beside(weights[..., index], result) * result for index, result in enumerate(results)]
    return torch.stack(weighted).sum(0)


class Switch(nn.Module):
    """Hard routing: each sample passes only the branch with its highest score, or with its index."""

    treats_samples_alone = True

    def __init__(self, router: nn.Module, branches: Sequence[nn.Module]) -> None:
        super().__init__()
        self.router = router
        self.branches = nn.ModuleList(branches)

    def forward(self, stream: Any, *further: Any) -> Any:
        choice = choose(self.router(stream, *further), len(self.branches))
        if self._must_be_static(stream):
            return select(choice, [branch(stream) for branch in self.branches])
        return route(self, choice, stream)

    def _must_be_static(self, stream: Any) -> bool:
        # Compilers want shapes that do not depend on data: there every branch sees all samples, and one result is kept.
        # Batch normalisation would then see samples that are not its own, so it stays routed, and the compiler objects.
        is_traced = torch.compiler.is_compiling() or isinstance(stream, fx.Proxy | FakeTensor)
        return is_traced and not mixes_samples(self.branches)


def choose(scores: Tensor, num_branches: int) -> Tensor:
    """The branch of each sample: its index as given, or the position of its highest score."""
    if not scores.is_floating_point():
        return scores.reshape(-1)
    _require_width(scores, num_branches, "branch")
    return scores.argmax(-1)


def select(choice: Tensor, results: list[Tensor]) -> Tensor:
    """Of results computed for all samples, the chosen one of each."""
    selected = results[0]
    for index, result in enumerate(results[1:], start=1):
        selected = torch.where(_beside(choice == index, result), result, selected)
    return selected


def route(switch: Switch, choice: Tensor, stream: Tensor) -> Tensor:
    """Each branch on its own samples only, the results put back in the order of the batch."""
    rows = [(choice == index).nonzero().squeeze(1) for index in range(len(switch.branches))]
    _require_all_routed(sum(len(some) for some in rows), choice, len(rows))
    taken = [(branch, some) for branch, some in zip(switch.branches, rows, strict=True) if len(some)]
    if not taken:
        return switch.branches[0](stream)  # type: ignore[no-any-return]
    results = torch.cat([branch(stream.index_select(0, some)) for branch, some in taken])
    order = torch.cat([some for _, some in taken])
    return results.index_select(0, torch.argsort(order))


def _require_width(scores: Tensor, count: int, noun: str) -> None:
    if scores.shape[-1] != count:
        raise ConfigError(
            f"the router gives {scores.shape[-1]} scores for {count} {noun}{'es' if noun == 'branch' else 's'}",
            hint=f"let its last dimension be {count}",
        )


def _require_all_routed(routed: int, choice: Tensor, num_branches: int) -> None:
    if routed != len(choice):
        raise ConfigError(
            f"the router chose branches {int(choice.min())} to {int(choice.max())}, there are {num_branches}",
            hint=f"give indices from 0 to {num_branches - 1}",
        )


class MapElements(nn.Module):
    """A module over the elements (dimension 1) of every sample; one batched call if samples are independent."""

    treats_samples_alone = True

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.is_batched = treats_samples_alone(body)

    def forward(self, elements: Tensor, *further: Tensor) -> Any:
        if not self.is_batched:
            return map_in_turn(self, elements, *further)
        repeated = [value.repeat_interleave(elements.shape[1], dim=0) for value in further]
        return self.body(elements.flatten(0, 1), *repeated).unflatten(0, elements.shape[:2])

    def extra_repr(self) -> str:
        return "batched" if self.is_batched else "in turn"


def map_in_turn(block: MapElements, elements: Tensor, *further: Tensor) -> Tensor:
    """One call per element."""
    return torch.stack([block.body(element, *further) for element in elements.unbind(1)], dim=1)


class MapSlices(nn.Module):
    """A module over equal slices of a dimension, concatenated again; one batched call if samples are independent."""

    treats_samples_alone = True

    def __init__(self, body: nn.Module, *, count: int, dim: int) -> None:
        super().__init__()
        self.body = body
        self.count = count
        self.dim = dim
        self.is_batched = treats_samples_alone(body)

    def forward(self, whole: Tensor, *further: Tensor) -> Tensor:
        pieces = cut(whole, self.count, self.dim)
        if not self.is_batched:
            return torch.cat([self.body(pieces[index], *further) for index in range(self.count)], self.dim)
        repeated = [torch.cat([value] * self.count) for value in further]
        results = self.body(torch.cat(tuple(pieces[index] for index in range(self.count))), *repeated)
        return torch.cat(results.chunk(self.count), self.dim)

    def extra_repr(self) -> str:
        return f"count={self.count}, dim={self.dim}, {'batched' if self.is_batched else 'in turn'}"


def cut(whole: Tensor, count: int, dim: int) -> Sequence[Tensor]:
    """Equal slices of a dimension."""
    if whole.shape[dim] % count:
        raise ConfigError(
            f"dimension {dim} has {whole.shape[dim]} entries, which {count} slices do not divide",
            hint="choose a number of slices that divides it",
        )
    return whole.chunk(count, dim)


for _name in ("repeat_until", "repeat_while", "mix", "choose", "select", "route", "map_in_turn", "cut"):
    fx.wrap(_name)
