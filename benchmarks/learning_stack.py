"""Many small runs of local steps at once: the replicas of all cells are rows of one tensor, stepped together.

Has the arithmetic of the lab at a tenth of its cost per step: `learning_study.py --check` compares the two. Models
must have no buffers. Called by learning_study.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from outrider.data.order import shuffled


@dataclass(frozen=True, kw_only=True)
class StackTask:
    """A model, its data and optimizer; `optimizer` is one of `OPTIMIZERS`."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: str
    rate: float
    data: str
    batch_size: int
    batches: int
    """Of a run, in all ranks together."""
    schedule: Callable[..., float] | None = None
    """The part of the rate at a tick of `num_steps`."""
    max_grad_norm: float | None = None
    weight_decay: float = 0.0
    gradient: Callable[[dict[str, Tensor], tuple[Tensor, ...]], dict[str, Tensor]] | None = None
    """Of all rows at once, where that is quicker by hand; else torch.func finds it."""


@dataclass(frozen=True, kw_only=True)
class StackRun:
    """What differs between the runs of one stack."""

    seed: int
    rate: float = 1.0
    """Relative to the task's."""
    windows: Sequence[Sequence[Sequence[int]]] = ()
    """Per segment and window, for each batch of the window in its order, the rank that takes it."""
    momentum: float = 0.0
    """Of the outer Nesterov step."""
    outer_rate: float = 1.0
    period: int = 1
    """Averages per step of the outer momentum; more than one is delayed Nesterov."""
    averages_state: bool = False
    weight_power: float = 1.0
    """A rank's weight in the average is its samples to this power."""
    delay: int = 0
    """Steps by which a gradient is applied late."""
    is_behind: bool = False
    """Whether averages arrive half a window late, as in `async`; each rank keeps the steps it has taken meanwhile."""
    exact_segments: int = 0
    """The first segments, in which rank 0 takes every batch: the same as exact steps, shared or not."""


# Optimizers: `state` holds tensors like the parameters; `active` is 1 for rows that step, else 0.


def _adam(p: Tensor, g: Tensor, rate: Tensor, active: Tensor, state: dict[str, Tensor], decay: float) -> None:
    count = state["count"].add_(active).clamp(min=1)
    if decay:
        p.mul_(1 - rate * decay * active)
    state["mean"].lerp_(g, 0.1 * active)
    state["square"].lerp_(g * g, 0.001 * active)
    size = (state["square"] / (1 - 0.999**count)).sqrt_().add_(1e-8)
    p.addcmul_(state["mean"] / size, -rate * active / (1 - 0.9**count))


def _rmsprop(p: Tensor, g: Tensor, rate: Tensor, active: Tensor, state: dict[str, Tensor], decay: float) -> None:
    state["square"].lerp_(g * g, 0.01 * active)
    p.addcmul_(g / (state["square"].sqrt() + 1e-8), -rate * active)


def _sgd(p: Tensor, g: Tensor, rate: Tensor, active: Tensor, state: dict[str, Tensor], decay: float) -> None:
    state["mean"].mul_(1 - 0.1 * active).addcmul_(g, active)
    p.addcmul_(state["mean"], -rate * active)


OPTIMIZERS = {"adam": _adam, "adamw": _adam, "rmsprop": _rmsprop, "sgd": _sgd}
"""With torch's defaults; sgd has a momentum of 0.9."""


@torch.no_grad()
def mlp_gradient(params: dict[str, Tensor], batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Of a network with one hidden layer of ReLU and cross-entropy; a quarter of the overhead of torch.func."""
    (first, first_bias, second, second_bias), (images, labels) = params.values(), batch
    inputs = images.flatten(2)
    hidden = torch.baddbmm(first_bias[:, None], inputs, first.transpose(1, 2)).relu_()
    error = torch.baddbmm(second_bias[:, None], hidden, second.transpose(1, 2)).softmax(2)
    error.scatter_add_(2, labels[..., None], torch.full_like(error[..., :1], -1.0))
    error /= labels.shape[1]
    back = torch.bmm(error, second) * (hidden > 0)
    found = (
        torch.bmm(back.transpose(1, 2), inputs),
        back.sum(1),
        torch.bmm(error.transpose(1, 2), hidden),
        error.sum(1),
    )
    return dict(zip(params, found, strict=True))


class Stack:
    """All runs of a list, which must have the same number of ranks, segments and batches."""

    def __init__(self, task: StackTask, runs: Sequence[StackRun], data: tuple[Tensor, ...], *, length: int) -> None:
        self.task, self.runs, self.data, self.length = task, runs, data, length
        self.model = task.model()
        self.ranks = 1 + max(rank for segment in runs[0].windows for window in segment for rank in window)
        self.shapes = {name: p.shape for name, p in self.model.named_parameters()}
        self.ref = torch.stack([_initial(task, run.seed) for run in runs])
        self.params = self.ref.repeat_interleave(self.ranks, 0)
        self.state = {name: torch.zeros_like(self.params) for name in ("mean", "square")}
        self.state["count"] = torch.zeros(len(self.params), 1)
        self.velocity, self.kept = torch.zeros_like(self.ref), torch.zeros_like(self.ref)
        self.begun = self.params.clone()
        """Where each replica counts its displacement from, if averages arrive late."""
        self.coming: dict[int, tuple[int, Tensor]] = {}
        """Steps until the average of a run arrives, and what it then adds to each replica."""
        self.num_averages = [0] * len(runs)
        needed = length * task.batch_size
        assert needed <= len(data[0]), f"{needed} samples are needed, {len(data[0])} are there"
        self.orders = [torch.as_tensor(list(shuffled(needed, seed=run.seed, epoch=0))) for run in runs]
        self.base = torch.tensor([run.rate * task.rate for run in runs]).repeat_interleave(self.ranks)[:, None]
        self.late: list[Tensor] = []
        self.gradient = task.gradient or vmap(grad(self._loss), randomness="error")

    def _loss(self, params: dict[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        return self.task.loss(lambda x: functional_call(self.model, params, (x,)), batch)  # type: ignore[arg-type]

    def run_segment(self, number: int) -> None:
        """All windows of one segment in every run; runs whose windows are over wait for the others."""
        plans = [_ticks(run.windows, number, self.ranks) for run in self.runs]
        for tick in range(max(len(plan) for plan in plans)):
            rows = [plan[tick] if tick < len(plan) else ((None,) * self.ranks, ()) for plan in plans]
            self._step([batch for batches, _ in rows for batch in batches])
            for cell, (_, samples) in enumerate(rows):
                if tick < len(plans[cell]):
                    self._arrive(cell)
                if samples and self.ranks > 1:
                    (self._average_behind if self.runs[cell].is_behind else self._average)(cell, samples)
        for cell, run in enumerate(self.runs):
            if run.exact_segments == number + 1:
                rows = slice(cell * self.ranks, (cell + 1) * self.ranks)
                for tensor in self.state.values():
                    tensor[rows] = tensor[cell * self.ranks].clone()
                self.velocity[cell] = 0

    def _step(self, batches: Sequence[int | None]) -> None:
        size = self.task.batch_size
        places = [
            self.orders[row // self.ranks][(batch or 0) * size : ((batch or 0) + 1) * size]
            for row, batch in enumerate(batches)
        ]
        index = torch.stack(places)
        with sdpa_kernel(SDPBackend.MATH):
            grads = self.gradient(self._views(self.params), tuple(tensor[index] for tensor in self.data))
        flat = torch.cat([grads[name].flatten(1) for name in self.shapes], 1)
        if self.task.max_grad_norm is not None:
            flat *= (self.task.max_grad_norm / flat.norm(dim=1, keepdim=True).clamp(min=1e-9)).clamp(max=1)
        active = torch.tensor([float(batch is not None) for batch in batches])[:, None]
        delay = self.runs[0].delay
        self.late.append(flat)
        if len(self.late) > delay:
            due = self.late.pop(0)
            rate = self.base * torch.tensor([self._factor(batch) for batch in batches])[:, None]
            OPTIMIZERS[self.task.optimizer](self.params, due, rate, active, self.state, self.task.weight_decay)

    def _factor(self, batch: int | None) -> float:
        return self.task.schedule(batch or 0, num_steps=self.length) if self.task.schedule else 1.0

    def _average(self, cell: int, samples: Sequence[int]) -> None:
        run = self.runs[cell]
        rows = slice(cell * self.ranks, (cell + 1) * self.ranks)
        weights = torch.tensor([float(count) ** run.weight_power if count else 0.0 for count in samples])
        weights /= weights.sum()
        delta = weights @ self.params[rows] - self.ref[cell]
        self.ref[cell] += run.outer_rate * delta
        self.num_averages[cell] += 1
        is_exact = not any(samples[1:]) and run.exact_segments > 0
        if run.momentum and not is_exact:
            self.kept[cell] += delta
            if self.num_averages[cell] % run.period == 0:
                self.velocity[cell] = run.momentum * self.velocity[cell] + self.kept[cell]
                self.ref[cell] += run.momentum * self.velocity[cell]
                self.kept[cell] = 0
        self.params[rows] = self.ref[cell]
        if run.averages_state:
            for name in ("mean", "square"):
                self.state[name][rows] = weights @ self.state[name][rows]

    def _average_behind(self, cell: int, samples: Sequence[int]) -> None:
        self._arrive(cell, at_once=True)
        rows = slice(cell * self.ranks, (cell + 1) * self.ranks)
        weights = torch.tensor([float(count) for count in samples])
        own = self.params[rows] - self.begun[rows]
        delta = (weights / weights.sum()) @ own
        self.ref[cell] += delta
        self.num_averages[cell] += 1
        self.begun[rows] = self.params[rows]
        self.coming[cell] = (max(1, max(samples) // 2), delta - own)

    def _arrive(self, cell: int, *, at_once: bool = False) -> None:
        """Count a step until the average of this run arrives, or let it arrive at once."""
        if cell not in self.coming:
            return
        steps, shift = self.coming.pop(cell)
        if steps > 1 and not at_once:
            self.coming[cell] = (steps - 1, shift)
            return
        rows = slice(cell * self.ranks, (cell + 1) * self.ranks)
        self.params[rows] += shift
        self.begun[rows] += shift

    @torch.no_grad()
    def evaluate(self, data: tuple[Tensor, ...]) -> list[float]:
        """The loss of every run at the average of its replicas, not at the look-ahead of the outer step."""
        point = self.params if self.ranks == 1 else self.ref.clone()
        for cell, run in enumerate(self.runs):
            if run.momentum and run.period == 1:
                point[cell] -= run.momentum * self.velocity[cell]
        with sdpa_kernel(SDPBackend.MATH):
            return [float(self._loss(self._views(row[None], squeezed=True), data)) for row in point]

    def _views(self, flat: Tensor, *, squeezed: bool = False) -> dict[str, Tensor]:
        sizes = [shape.numel() for shape in self.shapes.values()]
        parts = flat.split(sizes, 1)
        lead = () if squeezed else (len(flat),)
        return {name: part.reshape(*lead, *self.shapes[name]) for name, part in zip(self.shapes, parts, strict=True)}


def _initial(task: StackTask, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.cat([p.detach().flatten() for p in task.model().parameters()])


def _ticks(windows: Sequence[Sequence[Sequence[int]]], segment: int, ranks: int) -> list[tuple[Any, Any]]:
    """Per tick the batch of each rank, and at the end of a window the batches of each rank in it."""
    first = sum(len(window) for before in windows[:segment] for window in before)
    ticks = []
    for window in windows[segment]:
        own: list[list[int]] = [[] for _ in range(ranks)]
        for place, rank in enumerate(window):
            own[rank].append(first + place)
        first += len(window)
        longest = max(len(batches) for batches in own)
        for tick in range(longest):
            batches = tuple(batches[tick] if tick < len(batches) else None for batches in own)
            ticks.append((batches, tuple(map(len, own)) if tick == longest - 1 else ()))
    return ticks
