"""Measures the forward and backward time of each node of a graph.

Measures on a copy, so that statistics, states and gradients of the graph do not change. Called by `Graph.profile`.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map

from outrider.errors import ConfigError
from outrider.flow.emit import NODE_KEY, VALUE_KEY, Wired


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeTime:
    """Median times of one node; the branches of a split are listed one by one."""

    node: str
    forward_ms: float
    backward_ms: float

    @property
    def total_ms(self) -> float:
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """The times of all nodes, in the order of the flow."""

    nodes: tuple[NodeTime, ...]
    repeats: int

    @property
    def total_ms(self) -> float:
        return sum(node.total_ms for node in self.nodes)

    def share(self, node: str) -> float:
        """The part of the whole time that a node takes."""
        return sum(each.total_ms for each in self.nodes if each.node == node) / (self.total_ms or 1.0)

    def __str__(self) -> str:
        head = f"{'node':<28} {'forward ms':>11} {'backward ms':>12} {'share':>7}"
        rows = [
            f"{each.node:<28.28} {each.forward_ms:>11.3f} {each.backward_ms:>12.3f} {self.share(each.node):>7.1%}"
            for each in self.nodes
        ]
        foot = f"{self.total_ms:.3f} ms in all, median of {self.repeats} runs after a warm-up"
        return "\n".join([head, *rows, foot])


@dataclass(kw_only=True, slots=True)
class NodeStopwatch:
    """Samples of one node, in milliseconds."""

    forward_ms: list[float] = field(default_factory=list)
    backward_ms: list[float] = field(default_factory=list)


def profile(graph: Wired, inputs: Sequence[Any], *, repeats: int) -> Profile:
    """Run a copy `repeats` times, node by node, after one run to warm up."""
    if repeats < 1:
        raise ConfigError(f"repeats must be >= 1, got {repeats}", hint="10 gives a steady median")
    twin = copy.deepcopy(graph)
    twin.zero_grad(set_to_none=True)
    twin(*inputs)
    Timed(twin).run(*inputs)
    watches = {value: NodeStopwatch() for node in graph.plan.nodes for value in node.makes}
    for _ in range(repeats):
        run = Timed(twin)
        run.run(*inputs)
        for name, watch in run.watches.items():
            watches[name].forward_ms.append(sum(watch.forward_ms))
            watches[name].backward_ms.append(sum(watch.backward_ms))
    times = [_median(name, watch) for name, watch in watches.items()]
    return Profile(nodes=tuple(times), repeats=repeats)


def _median(name: str, watch: NodeStopwatch) -> NodeTime:
    return NodeTime(
        node=name,
        forward_ms=statistics.median(watch.forward_ms),
        backward_ms=statistics.median(watch.backward_ms),
    )


class Timed(fx.Interpreter):
    """Runs a graph call by call; each sees values without history, so that its backward can be timed alone."""

    def __init__(self, graph: Wired) -> None:
        super().__init__(graph.to_fx())
        self.watches: dict[str, NodeStopwatch] = {}

    def run_node(self, n: fx.Node) -> Any:
        if NODE_KEY not in n.meta:
            return super().run_node(n)
        watch = self.watches.setdefault(n.meta.get(VALUE_KEY, n.meta[NODE_KEY]), NodeStopwatch())
        started = _now_ms()
        result = super().run_node(n)
        watch.forward_ms.append(_now_ms() - started)
        watch.backward_ms.append(_backward_ms(result))
        return tree_map(_fresh, result)


def _fresh(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _backward_ms(result: Any) -> float:
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    if not outputs:
        return 0.0
    gradients = [torch.ones_like(output) for output in outputs]
    started = _now_ms()
    torch.autograd.backward(outputs, gradients)
    return _now_ms() - started


def _now_ms() -> float:
    """The current time, after waiting for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() * 1e3
