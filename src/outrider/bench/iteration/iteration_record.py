"""The file of an iteration benchmark: the format of PyTorch's own tools, with additional keys of ours.

Decides how the file is read and written, and refuses other files. Imports no torch. Called by benchmark and diff.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from outrider._version import __version__
from outrider.errors import DataError

SCHEMA_VERSION = 2
"""Files of version 1 have our keys at the top, and their entries model by model."""
OWN_KEY = "outrider"
"""The version of Outrider at the top of the file, since PyTorch's diff.py prints every key there; our other keys are
under the same name in the first entry of the results."""
PYTORCH_MODELS = ("resnet50", "resnet101", "resnext50_32x4d", "resnext101_32x8d")
"""In the order in which PyTorch's benchmark measures them: its diff.py pairs entries by their position."""
RESULTS_KEY = "benchmark_results"
OTHERS_KEY = "others_part"
MOST_OTHERS = 0.1
"""Processor use of other programs above which times of CPU ranks are not comparable."""
DDP = "ddp"
OURS = " (outrider "
"""Between the name of a model and that of the policy, in entries of our policies."""
_HINT = "pass a file written by `outrider bench iteration --json`, or by PyTorch's benchmarks/distributed/ddp"


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds per iteration of one world, ordered by round, and within a round by rank."""

    num_ranks: int
    is_plain: bool
    """One device without any wrapper: the reference."""
    measurements: tuple[float, ...]
    rounds: tuple[tuple[int, ...], ...] | None = None
    """Per round of fresh processes, the number of measurements of each rank; None if the file has no rounds."""

    @property
    def label(self) -> str:
        return "no DDP" if self.is_plain else f"{self.num_ranks} rank{'' if self.num_ranks == 1 else 's'}"

    def percentile(self, percent: float) -> float:
        return percentile(self.measurements, percent)

    def iterations(self) -> list[list[float]]:
        """Per round, each iteration once: ranks that step together are not independent, so their mean stands."""
        iterations, start = [], 0
        for counts in self._rounds():
            ranks = []
            for count in counts:
                ranks.append(self.measurements[start : start + count])
                start += count
            # Ranks that step on their own may have taken different numbers of steps.
            steps = zip(*ranks, strict=True) if len(set(counts)) == 1 else ((one,) for row in ranks for one in row)
            iterations.append([math.fsum(step) / len(step) for step in steps])
        return iterations

    def _rounds(self) -> tuple[tuple[int, ...], ...]:
        if self.rounds is not None:
            return self.rounds
        each, rest = divmod(len(self.measurements), self.num_ranks)
        return ((len(self.measurements),) if rest else (each,) * self.num_ranks,)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTimings:
    """All worlds of one model and one loop (DDP or a policy)."""

    model: str
    """The name in the file; for a policy it contains the policy."""
    batch_size: int
    timings: tuple[Timing, ...]

    @property
    def is_ours(self) -> bool:
        """Whether one of our policies was measured, and not torch's DDP."""
        return self.model.endswith(")") and OURS in self.model


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationFile:
    """A benchmark as it was written down."""

    name: str
    settings: dict[str, Any]
    """Everything but the results, nested keys joined with a space."""
    models: tuple[ModelTimings, ...]
    machine: dict[str, Any] = field(default_factory=dict)
    """The environment on which its speed depends; empty if the file has none."""
    others_part: float | None = None
    """Processor use of other programs during the measurement; None if the file does not contain it."""
    devices: tuple[str, ...] = ()

    @property
    def was_disturbed(self) -> bool:
        """Whether CPU ranks had to share their cores with other programs."""
        has_cpu_ranks = any(device.startswith("cpu") for device in self.devices)
        return has_cpu_ranks and self.others_part is not None and self.others_part > MOST_OTHERS


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two nearest values, in proportion."""
    return float(numpy.percentile(values, percent))


def document(
    *,
    pytorch_version: str,
    cuda_version: str | None,
    distributed_backend: str,
    bucket_size: int,
    models: Sequence[ModelTimings],
    own: Mapping[str, Any],
) -> dict[str, Any]:
    """The benchmark as JSON; `own` contains our additional keys."""
    return {
        "pytorch_version": pytorch_version,
        "cuda_version": cuda_version,
        "distributed_backend": distributed_backend,
        "bucket_size": bucket_size,
        OWN_KEY: __version__,
        RESULTS_KEY: _entries(models, {"schema_version": SCHEMA_VERSION, **own}),
    }


def _entries(models: Sequence[ModelTimings], own: Mapping[str, Any]) -> list[dict[str, Any]]:
    first, *others = sorted(models, key=_place)
    return [{**_model_document(first), OWN_KEY: own}, *map(_model_document, others)]


def _place(one: ModelTimings) -> tuple[bool, int]:
    """DDP before our policies, models as in PyTorch's files; the sort keeps the order of all others."""
    is_known = one.model in PYTORCH_MODELS
    return one.is_ours, PYTORCH_MODELS.index(one.model) if is_known else len(PYTORCH_MODELS)


def _model_document(one: ModelTimings) -> dict[str, Any]:
    return {
        "model": one.model,
        "batch_size": one.batch_size,
        "result": [
            {
                "ranks": list(range(timing.num_ranks)),
                # To a tenth of a microsecond; more digits are noise.
                "measurements": [round(time_s, 7) for time_s in timing.measurements],
                "rounds": timing.rounds and [list(counts) for counts in timing.rounds],
            }
            for timing in one.timings
        ],
    }


def read_iterations(path: Path) -> IterationFile:
    """The benchmark in a file, ours or PyTorch's."""
    content = _parsed(path)
    entries = content.get(RESULTS_KEY)
    if not isinstance(entries, list) or not entries:
        raise DataError(f"{path} is no iteration benchmark: it has no {RESULTS_KEY}", hint=_HINT)
    own = _own(content)
    environment = own.get("environment", {}) if isinstance(own, dict) else {}
    settings = {name: value for name, value in content.items() if name not in (RESULTS_KEY, OWN_KEY)}
    if isinstance(own, dict):
        settings |= _flat({name: value for name, value in own.items() if name != "environment"})
        settings |= _flat({name: value for name, value in environment.items() if name != OTHERS_KEY})
    return IterationFile(
        name=str(path),
        settings=settings,
        models=tuple(_read_model(path, position, entry) for position, entry in enumerate(entries)),
        machine={name: environment[name] for name in ("host", "cpu", "num_cores", "gpus") if name in environment},
        others_part=environment.get(OTHERS_KEY),
        devices=tuple(settings.get("settings devices") or ()),
    )


def _own(content: Mapping[str, Any]) -> Any:
    """Our keys; at the top of files of version 1."""
    at_top = content.get(OWN_KEY)
    if isinstance(at_top, dict):
        return at_top
    first = content[RESULTS_KEY][0]
    return first.get(OWN_KEY) if isinstance(first, dict) else None


def _parsed(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read {path}: {os.strerror(error.errno or 0).lower()}", hint=_HINT) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no JSON: it is not text", hint=_HINT) from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is no JSON: line {error.lineno}: {error.msg.lower()}", hint=_HINT) from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is no iteration benchmark: it is a JSON {_kind(content)}", hint=_HINT)
    return content


def _read_model(path: Path, position: int, entry: Any) -> ModelTimings:
    try:
        return ModelTimings(
            model=str(entry["model"]),
            batch_size=int(entry["batch_size"]),
            timings=tuple(_read_timing(number, one) for number, one in enumerate(entry["result"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        trouble = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{path} is damaged: {RESULTS_KEY}[{position}]: {trouble}", hint=_HINT) from error


def _read_timing(number: int, entry: Any) -> Timing:
    measurements = tuple(float(value) for value in entry["measurements"])
    num_ranks = len(entry["ranks"])
    if num_ranks < 1:
        raise ValueError(f"result {number} has no ranks")
    if not measurements or not all(value > 0 and math.isfinite(value) for value in measurements):
        raise ValueError(f"result {number} needs measurements above 0")
    rounds = entry.get("rounds") and tuple(tuple(map(int, counts)) for counts in entry["rounds"])
    if rounds and sum(map(sum, rounds)) != len(measurements):
        raise ValueError(f"result {number} has {len(measurements)} measurements, its rounds {sum(map(sum, rounds))}")
    # PyTorch's rule: the first is the run without DDP.
    return Timing(num_ranks=num_ranks, is_plain=number == 0, measurements=measurements, rounds=rounds or None)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name} ")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _kind(content: object) -> str:
    return "list" if isinstance(content, list) else "string" if isinstance(content, str) else "value"
