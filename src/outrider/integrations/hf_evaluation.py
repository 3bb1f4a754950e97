"""Shares an evaluation of a Trainer among the ranks: whichever rank is ready takes the next batch.

Decides how the parts of all ranks become the result of one device: batches are those of one device, and their results
are put in its order. Used by `outrider.integrations.huggingface` while all ranks train.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers import EvalPrediction
from transformers.trainer_pt_utils import nested_concat
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize

from outrider.api.session_hooks import SessionHooks
from outrider.integrations.rank_arrays import RankArrays

Evaluate = Callable[[Any], EvalLoopOutput]


class PartLoader:
    """The batches of an evaluation that this rank takes; the Trainer reads it like a DataLoader."""

    def __init__(self, loader: DataLoader[Any], numbers: Iterator[int], *, batch_size: int) -> None:
        self.dataset: Any = loader.dataset
        self.batch_size = batch_size
        self._collate = loader.collate_fn
        self._numbers = numbers
        self.taken: list[tuple[int, int]] = []
        """Number and samples of each batch, in the order in which this rank took them."""

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        for number in self._numbers:
            start = number * self.batch_size
            indices = range(start, min(start + self.batch_size, len(self.dataset)))
            self.taken.append((number, len(indices)))
            yield self._collate(self._read(indices))

    def _read(self, indices: Sequence[int]) -> list[Any]:
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(list(indices)))
        return [self.dataset[index] for index in indices]


def can_share(trainer: Any, loader: Any) -> bool:
    """Whether the batches of this evaluation can be divided; otherwise every rank evaluates all of them."""
    args, batches = trainer.args, getattr(loader, "batch_sampler", None)
    return (
        type(batches) is BatchSampler
        and type(batches.sampler) is SequentialSampler
        and hasattr(loader.dataset, "__len__")
        and not args.batch_eval_metrics
        and args.eval_do_concat_batches
        and not args.eval_use_gather_object
        and not args.include_for_metrics
        # Generated texts of different batches have different lengths.
        and not getattr(args, "predict_with_generate", False)
        and len(batches) >= args.world_size > 1
    )


def evaluate_together(
    trainer: Any,
    loader: DataLoader[Any],
    hooks: SessionHooks,
    run: Evaluate,
    *,
    arrays: RankArrays,
    name: str,
    prefix: str,
) -> EvalLoopOutput:
    """The result of one device, computed by all ranks; `run` evaluates what it is given. All ranks call this."""
    batches: Any = loader.batch_sampler
    part = PartLoader(loader, hooks.numbers(name, len(batches)), batch_size=batches.batch_size)
    output = _evaluate_part(trainer, part, run)
    metrics, key = dict(output.metrics), f"{prefix}_loss"
    parts = [
        _Told(**told)
        for told in hooks.exchange({"taken": part.taken, "loss": metrics.pop(key, None)}, what="parts of an evaluation")
    ]
    told_arrays = arrays.gather([output.predictions, output.label_ids])
    predictions, labels = (
        _in_order([(one.taken, both[i]) for one, both in zip(parts, told_arrays, strict=True)]) for i in range(2)
    )
    if trainer.compute_metrics is not None and predictions is not None and labels is not None:
        prediction = EvalPrediction(predictions=predictions, label_ids=labels)
        told = denumpify_detensorize(trainer.compute_metrics(prediction))
        metrics |= {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": told[name] for name in told}
    losses = [(one.loss, one.samples) for one in parts if one.loss is not None]
    if losses:
        metrics[key] = sum(loss * count for loss, count in losses) / sum(count for _, count in losses)
    return EvalLoopOutput(predictions=predictions, label_ids=labels, metrics=metrics, num_samples=len(part.dataset))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Told:
    """What a rank tells the others of its batches."""

    taken: list[tuple[int, int]]
    loss: float | None

    @property
    def samples(self) -> int:
        return sum(count for _, count in self.taken)


def _evaluate_part(trainer: Any, part: PartLoader, run: Evaluate) -> EvalLoopOutput:
    """Losses, predictions and labels of this rank's batches; metrics are those of all of them, and come later."""
    compute, trainer.compute_metrics = trainer.compute_metrics, None
    # The Trainer repeats the loss of a batch as if it were full; on one process this cuts it to the batch's samples.
    trainer.gather_function = lambda tensors: _first(tensors, part.taken[-1][1])
    try:
        return run(part)
    finally:
        trainer.compute_metrics = compute


def _in_order(parts: list[tuple[list[tuple[int, int]], Any]]) -> Any:
    """The arrays of all ranks' batches, put in the order of the data set; None where there are none."""
    pieces: dict[int, Any] = {}
    for taken, arrays in parts:
        start = 0
        for number, samples in taken:
            if arrays is None:
                return None
            pieces[number] = _cut(arrays, start, start + samples)
            start += samples
    whole: Any = None
    for number in sorted(pieces):
        whole = pieces[number] if whole is None else nested_concat(whole, pieces[number], padding_index=-100)
    return whole


def _first(tensors: Any, count: int) -> Any:
    if isinstance(tensors, tuple | list):
        return type(tensors)(_first(tensor, count) for tensor in tensors)
    if isinstance(tensors, dict):
        return {name: _first(tensor, count) for name, tensor in tensors.items()}
    return tensors[:count]


def _cut(arrays: Any, start: int, stop: int) -> Any:
    if isinstance(arrays, tuple | list):
        return type(arrays)(_cut(array, start, stop) for array in arrays)
    if isinstance(arrays, dict):
        return {name: _cut(array, start, stop) for name, array in arrays.items()}
    return np.asarray(arrays)[start:stop]
