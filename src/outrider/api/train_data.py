"""Reads the data of `train()`: a data set, a stream, or a DataLoader, whose settings become options.

Decides which options follow from the data, and refuses those that contradict it. Called with the options of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from outrider.api.loaders import loader_settings, refuse_to_override
from outrider.data.feed import is_factory
from outrider.data.loading import LoadedData, LoadedEvaluation
from outrider.data.order import shuffled
from outrider.data.sample_sequence import SampleSequence
from outrider.data.stream_feed import is_stream, refuse_for_stream, stream_length
from outrider.errors import ConfigError


def read_data(dataset: Any, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the data set and the options completed from it; the user's own options take precedence."""
    told = dict(options)
    loading = None
    if isinstance(dataset, DataLoader):
        told = _of_loader(dataset, told)
        loading, dataset = told.pop("loading"), dataset.dataset
    if "eval_dataset" in told:
        told["eval_dataset"] = _evaluated(told["eval_dataset"])
    if is_stream(dataset) or told.get("length") is not None:
        told |= _of_stream(dataset, told)
    if told.get("order") is not None:
        told |= _of_order(told)
    return dataset if loading is None else LoadedData(dataset=dataset, loading=loading), told


def _evaluated(given: Any) -> Any:
    """The data of an evaluation, with the settings of its DataLoader if it has one."""
    dataset = given.dataset if isinstance(given, DataLoader) else given
    if is_stream(dataset):
        raise ConfigError(
            f"eval_dataset is {type(dataset).__name__}, an iterable data set",
            hint="make it a list of its samples: eval_dataset=list(stream)",
        )
    if _is_empty(dataset):
        raise ConfigError("eval_dataset is empty", hint="check its path, split or filter, or leave evaluate out")
    return _of_evaluation_loader(given) if isinstance(given, DataLoader) else given


def _of_evaluation_loader(loader: DataLoader[Any]) -> LoadedEvaluation:
    found = loader_settings(loader)
    sequence = found.get("sequence")
    if sequence is not None:
        raise ConfigError(
            f"eval_dataset is a DataLoader with {sequence.name}, and an evaluation takes each sample once",
            hint="pass the samples to evaluate: eval_dataset=torch.utils.data.Subset(dataset, indices)",
        )
    if found["drop_last"]:
        raise ConfigError(
            "eval_dataset is a DataLoader with drop_last=True, and an evaluation takes each sample once",
            hint="leave drop_last out",
        )
    return LoadedEvaluation(
        loaded=LoadedData(dataset=loader.dataset, loading=found["loading"]),
        batch_size=found["batch_size"],
        workers=found["workers"],
        collate=found.get("collate"),
    )


def _is_empty(dataset: Any) -> bool:
    """Whether the length of a data set is 0; data sets that functions return are checked later."""
    try:
        return dataset is not None and len(dataset) == 0
    except (TypeError, NotImplementedError):
        return False


def _of_loader(loader: DataLoader[Any], given: dict[str, Any]) -> dict[str, Any]:
    found = loader_settings(loader)
    sequence, seed = found.pop("sequence", None), found.pop("order_seed")
    if sequence is not None:
        refuse_to_override(sequence, given, always="order")
        if sequence.has_batches:
            _refuse_to_cut(sequence, given)
        found["order"] = sequence if sequence.has_batches else sequence.source
    elif seed is not None and found["shuffle"] and given.get("shuffle") is None and given.get("order") is None:
        found["order"] = SeededOrder(len(loader.dataset), seed=seed)  # type: ignore[arg-type]
    if "order" in found or is_stream(loader.dataset):
        del found["shuffle"]
    if given.get("order") is not None:
        found.pop("shuffle", None)
    return found | given


def _refuse_to_cut(sequence: SampleSequence, given: Mapping[str, Any]) -> None:
    """Raise for options that would divide the batches of a batch sampler."""
    for name, default in (("accumulate", 1), ("micro_batch", "auto")):
        if given.get(name, default) != default:
            raise ConfigError(
                f"{name} was given, but {sequence.name} makes batches that are taken whole",
                hint=f"leave {name} out, and let {sequence.name} make batches that fit",
            )


def _of_stream(dataset: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    if not is_stream(dataset) and not is_factory(dataset):
        raise ConfigError(
            f"length was given, but {type(dataset).__name__} is not an iterable data set", hint="leave length out"
        )
    refuse_for_stream(dataset, shuffle=given.get("shuffle"), order=given.get("order"), workers=given.get("workers"))
    length = given.get("length")
    return {"shuffle": False, "length": length if is_factory(dataset) else stream_length(dataset, length)}


def _of_order(given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("shuffle"):
        name = SampleSequence.of(given["order"]).name
        raise ConfigError(f"shuffle was given, but {name} decides that already", hint="leave shuffle out")
    return {"shuffle": False}


class SeededOrder:
    """A new permutation in each epoch, from the seed of a DataLoader's generator."""

    def __init__(self, num_samples: int, *, seed: int) -> None:
        self._num_samples = num_samples
        self._seed = seed

    def __call__(self, epoch: int) -> Any:
        return shuffled(self._num_samples, seed=self._seed, epoch=epoch)
