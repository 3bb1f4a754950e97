"""A replica's steps as CUDA graphs: one launch instead of hundreds, with inputs at fixed addresses.

Decides which steps are captured (those of repeated batch shapes) and which run eagerly. `execution` decides whether
capture pays. Parameters, buffers and states belong to the replica.
"""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from outrider.data.packed_batch import PackedBatch
from outrider.replica.capturable_optimizer import OptimizerForm, Rates, hyperparameters, make_capturable
from outrider.replica.capture import CaptureStream, Overlapped, Uncapturable
from outrider.replica.logged_scalars import LogEntries
from outrider.replica.out_of_memory import free_memory
from outrider.replica.replica import Replica

MAX_GRAPHS = 12
"""Number of graphs kept; the least recently used is dropped."""
SIGHTS = 2
"""A shape is captured when it occurs this often; a single last batch is not worth a capture."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Graph:
    """A captured part of a step, and the work of the host at each replay."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Any]
    samples: int
    logged: dict[str, float]
    gradients: list[Tensor | None]
    """The gradients of this part, in the order of the arena's parameters."""


class CapturedSteps:
    """Runs a replica's steps as graphs.

    The first step after `forget` runs eagerly, so that the optimizer creates the state whose address graphs contain.
    """

    def __init__(self, replica: Replica, *, stream: CaptureStream, on_refusal: Callable[[str], None]) -> None:
        """`on_refusal` is called once with the reason if capture turns out to be impossible later."""
        self._replica = replica
        self._on_refusal = on_refusal
        self._stream = stream
        self._refused = False
        self._form = OptimizerForm(replica.optimizer)
        self._before_sleep: list[Any] | None = None
        self.num_warm_ups = 0
        """Counts parts of steps that ran eagerly or were captured; such steps do not measure speed."""
        self.forget()

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def forget(self) -> None:
        """Drop all graphs, after a change of parameters, optimizer state or optimizer settings."""
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
        self._sights: Counter[Hashable] = Counter()
        self._has_updated = False
        if self._refused:
            self._form.restore()
        else:
            make_capturable(self._replica.optimizer, self._replica.device)
        self._rates = Rates(self._replica.optimizer, self._replica.device)
        self._hyperparameters = hyperparameters(self._replica.optimizer)

    def give_up(self, reason: str) -> bool:
        """Free the memory set aside for graphs. If there are any, run eagerly from now on; otherwise return False."""
        has_graphs = bool(self._graphs)
        if has_graphs:
            self.refuse(reason)
        self._stream.free()
        return has_graphs

    # Between segments callbacks may freeze layers, change settings or load states, which graphs would not see.

    def sleep(self) -> None:
        """Remember the settings at the end of a segment."""
        self._before_sleep = self._facts()

    def wake(self) -> None:
        """Drop graphs at the start of a segment if anything has changed since the last one."""
        if self._before_sleep is not None and self._facts() != self._before_sleep:
            self.forget()

    def _facts(self) -> list[Any]:
        replica = self._replica
        parameters = [(parameter.requires_grad, parameter.data_ptr()) for parameter in replica.arena.parameters]
        modules = [module.training for module in replica.model.modules()]
        states = [
            value.data_ptr()
            for state in replica.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        return [parameters, modules, states, hyperparameters(replica.optimizer)]

    # The interface of a replica

    def step(self, packed_batch: PackedBatch, *, samples: int, at: int) -> None:
        replica = self._replica
        replica.follow_schedule(at)
        graph = self._graph_for("step", packed_batch, samples) if self._has_updated else None
        if graph is None:
            self._stream.run(lambda: replica.plain_step(packed_batch.batch(), samples=samples, at=at))
            self._updated()
            return
        self._rates.write(replica.rate_factor)
        self._replay(graph, packed_batch)
        replica.steps += 1

    def gradient(self, packed_batch: PackedBatch, *, samples: int) -> None:
        replica = self._replica
        graph = self._graph_for("gradient", packed_batch, samples)
        if graph is None:
            self.eager_gradient(packed_batch, samples=samples)
            return
        self._replay(graph, packed_batch)
        for parameter, gradient in zip(replica.arena.parameters, graph.gradients, strict=True):
            parameter.grad = gradient

    def eager_gradient(
        self, packed_batch: PackedBatch, *, samples: int, overlapped: Overlapped = contextlib.nullcontext
    ) -> None:
        """Compute an eager gradient, on the stream of the captured ones."""
        compute = self._replica.plain_gradient
        self._stream.run(lambda: compute(packed_batch.batch(), samples=samples, overlapped=overlapped))

    def update(self, *, at: int) -> None:
        replica = self._replica
        replica.follow_schedule(at)
        graph = self._update_graph() if self._has_updated else None
        if graph is None:
            self._stream.run(lambda: replica.plain_update(at=at))
            self._updated()
            return
        self._rates.write(replica.rate_factor)
        graph.graph.replay()
        replica.steps += 1

    def _updated(self) -> None:
        """Note an eager update; the first one creates the optimizer's state."""
        if not self._has_updated:
            self.num_warm_ups += 1
        self._has_updated = True

    # Graphs

    def _graph_for(self, part: str, packed_batch: PackedBatch, samples: int) -> _Graph | None:
        leaves, shape = pytree.tree_flatten(packed_batch.inputs)
        if self._refused or self._settings_moved() or not all(_is_fixed(leaf) for leaf in leaves):
            return None
        key = (part, samples, shape, tuple(_signature(leaf) for leaf in leaves))
        return self._kept(key) or self._captured(key, lambda: self._capture_batch(part, packed_batch, samples))

    def _update_graph(self) -> _Graph | None:
        if self._refused or self._settings_moved():
            return None
        # The graph reads gradients at fixed addresses: those of an exchange or of the captured gradient.
        places = tuple(None if p.grad is None else p.grad.data_ptr() for p in self._replica.arena.parameters)
        key = ("update", places)
        return self._kept(key) or self._captured(key, self._capture_update)

    def _kept(self, key: Hashable) -> _Graph | None:
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
        return graph

    def _captured(self, key: Hashable, capture: Callable[[], _Graph]) -> _Graph | None:
        self.num_warm_ups += 1
        self._sights[key] += 1
        if self._sights[key] < SIGHTS:
            return None
        graph = _graph_or_refusal(capture)
        if isinstance(graph, str):
            self.refuse(graph)
            # The step may have run out of memory, and its frames hold that memory until they are collected.
            free_memory(self._replica.device)
            return None
        self._graphs[key] = graph
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
        return graph

    def refuse(self, reason: str) -> None:
        """Run eagerly from now on."""
        self._refused = True
        self.forget()
        self._on_refusal(reason)

    def _settings_moved(self) -> bool:
        """Whether optimizer settings changed, by a momentum schedule or a callback, so that graphs are outdated."""
        if hyperparameters(self._replica.optimizer) == self._hyperparameters:
            return False
        self.refuse("settings of the optimizer other than its learning rate change between steps")
        return True

    def _capture_batch(self, part: str, packed_batch: PackedBatch, samples: int) -> _Graph:
        leaves, shape = pytree.tree_flatten(packed_batch.inputs)
        inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        held = PackedBatch(inputs=pytree.tree_unflatten(inputs, shape), unpack=packed_batch.unpack)
        replica = self._replica
        replica.optimizer.zero_grad(set_to_none=True)
        replica.loss_sums.at(replica.steps)
        before = replica.logged_scalars.entries()
        try:
            graph = self._stream.capture(lambda: self._batch_work(part, held, samples))
        finally:
            logged = replica.logged_scalars.take_back(before)
        replica.loss_sums.captured(samples)
        _check_logged(logged, before)
        gradients = [parameter.grad for parameter in replica.arena.parameters] if part == "gradient" else []
        replica.optimizer.zero_grad(set_to_none=True)
        return _Graph(graph=graph, inputs=inputs, samples=samples, logged=logged, gradients=gradients)

    def _batch_work(self, part: str, held: PackedBatch, samples: int) -> None:
        self._replica.compute_gradient(held.batch(), samples=samples)
        if part == "step":
            self._optimizer_work()
            self._replica.mark_update()
        self._replica.loss_sums.count_on()

    def _optimizer_work(self) -> None:
        self._replica.clip()
        with self._rates.installed():
            self._replica.optimizer.step()

    def _capture_update(self) -> _Graph:
        graph = self._stream.capture(self._optimizer_work)
        return _Graph(graph=graph, inputs=[], samples=0, logged={}, gradients=[])

    def _replay(self, graph: _Graph, packed_batch: PackedBatch) -> None:
        replica = self._replica
        for place, leaf in zip(graph.inputs, pytree.tree_leaves(packed_batch.inputs), strict=True):
            if isinstance(place, Tensor):
                place.copy_(leaf, non_blocking=True)
        replica.loss_sums.at(replica.steps)
        graph.graph.replay()
        replica.loss_sums.counted_on(graph.samples)
        replica.logged_scalars.logged_again(graph.logged)


def _graph_or_refusal(capture: Callable[[], _Graph]) -> _Graph | str:
    try:
        return capture()
    except Uncapturable as refusal:
        return str(refusal)


def _is_fixed(leaf: Any) -> bool:
    """Whether a graph can contain a leaf: tensors by address, plain values as constants."""
    if isinstance(leaf, Tensor):
        return leaf.is_cuda
    return leaf is None or isinstance(leaf, bool | int | str)


def _signature(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.stride(), leaf.dtype)
    hashable: Hashable = leaf
    return hashable


def _check_logged(logged: dict[str, float], before: LogEntries) -> None:
    for name in logged:
        if name not in before.slots:
            raise Uncapturable(
                f"log({name!r}, ...) is not given a tensor on the device at every step: a replay would not log it"
            )
