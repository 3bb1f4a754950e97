"""Compares runs with a saved baseline: regressions fail, improvements never do.

Decides what is compared, how large a loss must be and how sure, and that unlike machines are not compared at all.
Reads records only and knows no torch. Called by `bench validate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.bench.report.claims import ACCURACY_MARGIN, RELATIVE_MARGIN
from outrider.bench.statistics import Interval, difference_interval, mean
from outrider.bench.suite.groups import Group
from outrider.bench.suite.runs import SuiteRun
from outrider.bench.suite.summary import summarise_group
from outrider.errors import ConfigError, DataError

SCHEMA_VERSION = 1
MACHINE = ("cpu", "num_cores", "gpus")
VERSIONS = ("outrider", "torch", "python")
SPEED_MARGIN = 0.05
"""Part of the baseline's speed that may be lost before it is a regression."""
MIN_VALUES = 2
"""Of each side: one value says nothing about noise."""

REGRESSION = "regression"
SAME = "no regression"
IMPROVED = "improved"
NOT_COMPARED = "not compared"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One measure of one mode beside its baseline."""

    model: str
    mode: str
    measure: str
    verdict: str
    before: float | None = None
    now: float | None = None
    ci95: Interval | None = None
    """Of the change, now minus before."""
    reason: str = ""


def make_baseline(groups: Sequence[Group]) -> dict[str, Any]:
    """What a later comparison needs, with every raw value."""
    runs = [run for group in groups for run in group.runs]
    if not runs:
        raise DataError("nothing is finished, so there is nothing to save", hint="run `outrider bench sweep` first")
    return {
        "schema_version": SCHEMA_VERSION,
        "machine": _only(runs, MACHINE),
        "versions": _only(runs, VERSIONS),
        "models": {group.name: _model(group) for group in groups if group.by_mode},
    }


def _only(runs: Sequence[SuiteRun], names: Sequence[str]) -> dict[str, Any]:
    """The facts that all runs share; an error where they do not."""
    facts = [{name: run.environment.get(name) for name in names} for run in runs]
    for one in facts:
        if one != facts[0]:
            raise ConfigError(
                f"the runs were made under unlike conditions: {_shown(facts[0])}; {_shown(one)}",
                hint="keep the runs of one machine and one installation in a folder of their own",
            )
    return facts[0]


def _model(group: Group) -> dict[str, Any]:
    case, subject = group.case, group.subject
    return {
        "condition": {
            "data": case.data_name,
            "epochs": case.epochs,
            "batch_size": case.batch_size,
            "devices": list(case.devices),
            "settings": dict(case.settings),
            # Only where speed and quality are of different runs: baselines of before have no such thing.
            **({"timed_epochs": group.timed_epochs} if group.has_timed and group.has_untimed else {}),
        },
        "metric": subject.metric,
        "larger_is_better": subject.larger_is_better,
        "modes": {
            mode: {"eval": list(one.evals), "samples_per_s": list(one.speeds)}
            for mode, one in summarise_group(group).items()
        },
    }


def compare(groups: Sequence[Group], baseline: Mapping[str, Any]) -> list[Comparison]:
    """Everything that both sides have; refuses where the machine is another one."""
    current = make_baseline(groups)
    _check_alike(current["machine"], baseline["machine"])
    return [
        comparison
        for model, before in baseline["models"].items()
        for comparison in _compare_model(model, before, current["models"].get(model))
    ]


def _check_alike(machine: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    if dict(machine) != dict(before):
        raise ConfigError(
            f"the baseline is of another machine: {_shown(before)}; here: {_shown(machine)}",
            hint="save a baseline of this machine with --save",
        )


def _shown(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _compare_model(model: str, before: Mapping[str, Any], now: Mapping[str, Any] | None) -> list[Comparison]:
    if now is None:
        return [_left_out(model, mode, "it was not run") for mode in before["modes"]]
    if now["condition"] != before["condition"]:
        reason = f"conditions differ: {_shown(before['condition'])}; now {_shown(now['condition'])}"
        return [_left_out(model, mode, reason) for mode in before["modes"]]
    found = []
    for mode, values in before["modes"].items():
        if mode not in now["modes"]:
            found.append(_left_out(model, mode, "it was not run"))
            continue
        found += _compare_mode(model, mode, values, now["modes"][mode], before=before)
    return found


def _left_out(model: str, mode: str, reason: str) -> Comparison:
    return Comparison(model=model, mode=mode, measure="all", verdict=NOT_COMPARED, reason=reason)


def _compare_mode(
    model: str, mode: str, old: Mapping[str, list[float]], new: Mapping[str, list[float]], *, before: Mapping[str, Any]
) -> list[Comparison]:
    speeds = old["samples_per_s"], new["samples_per_s"]
    found = [
        _compare_values(model, mode, "samples_per_s", *speeds, margin=SPEED_MARGIN, sign=1.0)
        if all(speeds)
        else Comparison(model=model, mode=mode, measure="samples_per_s", verdict=NOT_COMPARED, reason=_untimed(*speeds))
    ]
    if old["eval"] and new["eval"]:
        is_accuracy = before["metric"] == "accuracy"
        margin = ACCURACY_MARGIN / abs(mean(old["eval"]) or 1.0) if is_accuracy else RELATIVE_MARGIN
        sign = 1.0 if before["larger_is_better"] else -1.0
        found.append(_compare_values(model, mode, before["metric"], old["eval"], new["eval"], margin=margin, sign=sign))
    return found


def _untimed(old: list[float], new: list[float]) -> str:
    sides = [name for name, speeds in (("before", old), ("now", new)) if not speeds]
    return f"its speed was not timed {' nor '.join(sides)}"


def _compare_values(
    model: str, mode: str, measure: str, old: list[float], new: list[float], *, margin: float, sign: float
) -> Comparison:
    """A regression is a loss beyond the margin of which the interval is sure; noise alone is none."""
    ci95 = difference_interval(new, old)
    if ci95 is None:
        reason = f"needs {MIN_VALUES} seeds on both sides, has {len(old)} and {len(new)}"
        return Comparison(model=model, mode=mode, measure=measure, verdict=NOT_COMPARED, reason=reason)
    best, worst = sorted((sign * ci95.low, sign * ci95.high), reverse=True)
    allowed = margin * abs(mean(old))
    verdict = REGRESSION if best < -allowed else IMPROVED if worst > 0 else SAME
    return Comparison(
        model=model, mode=mode, measure=measure, verdict=verdict, before=mean(old), now=mean(new), ci95=ci95
    )


def read_baseline(content: Mapping[str, Any], *, name: str) -> Mapping[str, Any]:
    """A baseline that was saved by us; an error where it is something else."""
    missing = [key for key in ("schema_version", "machine", "models") if key not in content]
    if missing:
        raise DataError(f"{name} is no baseline: {', '.join(missing)} missing", hint="save one with --save")
    if content["schema_version"] != SCHEMA_VERSION:
        raise DataError(
            f"{name} has schema version {content['schema_version']}, expected {SCHEMA_VERSION}",
            hint="save a new baseline with --save",
        )
    return content
