"""Prepared data loaders and schedules of accelerate scripts, as a session has them.

Decides what a loop over a prepared loader is: with the model in training mode a pass of the session, otherwise an
evaluation of which every rank computes a part of each batch. Used by `outrider.integrations.accelerate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from outrider.errors import ConfigError
from outrider.integrations.hf_batches import StepLoader


@dataclass(kw_only=True, slots=True)
class HandedOut:
    """The batch that the script has in hand."""

    samples: int
    """Of this rank's part of the step; those of the micro-batch are `count`."""
    count: int
    is_last: bool
    """Whether the optimizer steps after it."""
    is_training: bool


class PreparedLoader:
    """A loader given to `prepare()`; `len()` counts the batches that this rank takes at most in a pass."""

    def __init__(
        self, loader: DataLoader[Any], *, steps: StepLoader, open_pass: Callable[[PreparedLoader], Iterator[Any]]
    ) -> None:
        self.loader = loader
        self.steps = steps
        """The same data as training steps."""
        self.dataset: Any = loader.dataset
        self.batch_size = loader.batch_size
        self._open_pass = open_pass

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Any]:
        return self._open_pass(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


def parts(count: int, shares: Sequence[float]) -> list[range]:
    """The samples of a batch that each rank evaluates, by speed; a rank may have none of a small batch."""
    total, ends, reached = sum(shares), [], 0.0
    for share in shares:
        reached += share
        ends.append(round(count * reached / total))
    starts = [0, *ends[:-1]]
    return [range(start, stop) for start, stop in zip(starts, ends, strict=True)]


def evaluated_batches(loader: DataLoader[Any], shares: Sequence[float], *, rank: int) -> Iterator[tuple[Any, int]]:
    """This rank's part of every batch, with its number of samples; 0 where it computes on a sample of another rank."""
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler or type(batches.sampler) is not SequentialSampler:
        raise ConfigError(
            "an evaluation over a DataLoader that shuffles or has a sampler of its own: ranks would see other batches",
            hint="call model.train() before the training loop, and evaluate with shuffle=False",
        )
    collate: Any = loader.collate_fn
    for indices in batches:
        own = parts(len(indices), shares)[rank]
        chosen = [indices[position] for position in own] or indices[:1]
        yield collate(_read(loader.dataset, chosen)), len(own)


def _read(dataset: Any, indices: list[int]) -> list[Any]:
    if hasattr(dataset, "__getitems__"):
        return list(dataset.__getitems__(indices))
    return [dataset[index] for index in indices]


class PreparedSchedule:
    """A schedule given to `prepare()`: it ticks as on one device, whatever number of steps this rank takes."""

    _is_accelerate_prepared = True

    def __init__(self, scheduler: Any, *, ticks_due: Callable[[PreparedSchedule], int]) -> None:
        self.scheduler = scheduler
        self._ticks_due = ticks_due
        self.open_pass()

    def open_pass(self) -> None:
        """Count from here: ticks in this pass, and steps after which the script has asked for them."""
        self.in_pass = self.num_steps = 0
        self.is_estimated = False
        """Whether ticks of this pass follow this rank's estimate of the samples of all."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Called after `optimizer.step()`, or once per epoch."""
        for _ in range(self._ticks_due(self)):
            self.scheduler.step(*args, **kwargs)
            self.in_pass += 1

    def follow(self, ticks: int) -> None:
        """Tick up to this number in the pass, which other ranks have reached."""
        while self.in_pass < ticks:
            self.scheduler.step()
            self.in_pass += 1

    def state_dict(self) -> Any:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.scheduler.load_state_dict(state)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)


class TrainedPasses:
    """How many passes were trained, for `save_state()` and `load_state()`."""

    def __init__(self) -> None:
        self.num_passes = 0

    def state_dict(self) -> dict[str, int]:
        return {"num_passes": self.num_passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_passes = state["num_passes"]


def concatenated(values: list[Any]) -> Any:
    """The arrays of all ranks as tensors, one rank after the other, in the structure that each rank gave."""
    first = values[0]
    if isinstance(first, dict):
        return {name: concatenated([value[name] for value in values]) for name in first}
    if isinstance(first, tuple | list):
        return type(first)(concatenated(list(items)) for items in zip(*values, strict=True))
    return torch.cat(
        [torch.from_numpy(value).reshape(1) if value.ndim == 0 else torch.from_numpy(value) for value in values]
    )


def on_host(value: Any, *, keep: int | None) -> Any:
    """The same structure with tensors in host memory; of each only the first `keep` rows."""
    if isinstance(value, dict):
        return {name: on_host(item, keep=keep) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(on_host(item, keep=keep) for item in value)
    if not isinstance(value, torch.Tensor):
        raise ConfigError(
            f"gather() takes tensors, and tuples and dicts of them, got {type(value).__name__}",
            hint="use gather_for_metrics(values, use_gather_object=True) for numbers and text",
        )
    plain = value.detach().cpu()
    # NumPy has no bfloat16, which float32 holds exactly.
    plain = plain.float() if plain.dtype == torch.bfloat16 else plain
    return plain if keep is None else plain.reshape(-1)[:keep] if plain.ndim == 0 else plain[:keep]


def separated(state: Any) -> Any:
    """The tensors of a state in memory of their own: in a session parameters lie in one, and accelerate would keep one.

    Names of one tensor (tied weights) keep sharing it.
    """
    if not isinstance(state, dict):
        return state
    copies: dict[Any, torch.Tensor] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        key = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        return copies.setdefault(key, value.clone()) if value.numel() else value

    return type(state)((name, copy(value)) for name, value in state.items())
