"""Compares runs with a saved baseline: regressions fail, improvements never do.

Decides what is compared, and how large and how certain a regression must be; different machines are not compared.
Reads records only and imports no torch. Called by `bench validate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.bench.report.claims import ACCURACY_MARGIN, RELATIVE_MARGIN
from outrider.bench.statistics import Interval, difference_interval, mean
from outrider.bench.suite.groups import Group
from outrider.bench.suite.runs import SuiteRun
from outrider.bench.suite.suite_summary import summarise_group
from outrider.bench.tables import number, text_table
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
class ReferenceComparison:
    """One measure of one mode compared with its baseline."""

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
    """The content of a baseline, with every raw value."""
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
    """The facts that all runs share; an error if they do not."""
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
            # Only if speed and quality come from different runs; older baselines do not have this.
            **({"timed_epochs": group.timed_epochs} if group.has_timed and group.has_untimed else {}),
        },
        "metric": subject.metric,
        "larger_is_better": subject.larger_is_better,
        "modes": {
            mode: {"eval": list(one.evals), "samples_per_s": list(one.speeds)}
            for mode, one in summarise_group(group).items()
        },
    }


def compare(groups: Sequence[Group], baseline: Mapping[str, Any]) -> list[ReferenceComparison]:
    """Compare everything that both sides have; an error for another machine."""
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


def _compare_model(model: str, before: Mapping[str, Any], now: Mapping[str, Any] | None) -> list[ReferenceComparison]:
    if now is None:
        return [_left_out(model, mode, "all", "it was not run") for mode in before["modes"]]
    if now["condition"] != before["condition"]:
        reason = f"conditions differ: {_shown(before['condition'])}; now {_shown(now['condition'])}"
        return [_left_out(model, mode, "all", reason) for mode in before["modes"]]
    return [
        comparison
        for mode, values in before["modes"].items()
        for comparison in _compare_mode(model, mode, values, now["modes"].get(mode), before=before)
    ]


def _left_out(model: str, mode: str, measure: str, reason: str) -> ReferenceComparison:
    return ReferenceComparison(model=model, mode=mode, measure=measure, verdict=NOT_COMPARED, reason=reason)


def _compare_mode(
    model: str,
    mode: str,
    old: Mapping[str, list[float]],
    new: Mapping[str, list[float]] | None,
    *,
    before: Mapping[str, Any],
) -> list[ReferenceComparison]:
    if new is None:
        return [_left_out(model, mode, "all", "it was not run")]
    speeds = old["samples_per_s"], new["samples_per_s"]
    found = [
        _compare_values(model, mode, "samples_per_s", *speeds, margin=SPEED_MARGIN, sign=1.0)
        if all(speeds)
        else _left_out(model, mode, "samples_per_s", _untimed(*speeds))
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
) -> ReferenceComparison:
    """A regression is a loss beyond the margin of which the interval is sure; noise alone is none."""
    ci95 = difference_interval(new, old)
    if ci95 is None:
        reason = f"needs {MIN_VALUES} seeds on both sides, has {len(old)} and {len(new)}"
        return _left_out(model, mode, measure, reason)
    best, worst = sorted((sign * ci95.low, sign * ci95.high), reverse=True)
    allowed = margin * abs(mean(old))
    verdict = REGRESSION if best < -allowed else IMPROVED if worst > 0 else SAME
    return ReferenceComparison(
        model=model, mode=mode, measure=measure, verdict=verdict, before=mean(old), now=mean(new), ci95=ci95
    )


def read_baseline(content: Mapping[str, Any], *, name: str) -> Mapping[str, Any]:
    """A baseline that was saved by us; an error if it is something else."""
    missing = [key for key in ("schema_version", "machine", "models") if key not in content]
    if missing:
        raise DataError(f"{name} is no baseline: {', '.join(missing)} missing", hint="save one with --save")
    if content["schema_version"] != SCHEMA_VERSION:
        raise DataError(
            f"{name} has schema version {content['schema_version']}, expected {SCHEMA_VERSION}",
            hint="save a new baseline with --save",
        )
    return content


def render_comparisons(comparisons: Sequence[ReferenceComparison], *, baseline: Mapping[str, Any]) -> str:
    """The comparison as text: what was compared, what was not and why, and the verdict."""
    compared = [one for one in comparisons if one.verdict != NOT_COMPARED]
    parts = [_versions(baseline)]
    if compared:
        headers = ("model", "mode", "measure", "before", "now", "change, 95 %", "verdict")
        parts.append(text_table(headers, [_row(one) for one in compared], num_names=3))
    parts += [f"{one.model} {one.mode}: not compared, {one.reason}" for one in comparisons if one not in compared]
    return "\n".join([*parts, verdict_line(comparisons)])


def _versions(baseline: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in baseline.get("versions", {}).items())
    rule = f"a regression is a loss of more than {100 * SPEED_MARGIN:g} % of the speed, and surely not noise"
    return f"baseline: {versions or 'versions not known'}\n{rule}"


def _row(one: ReferenceComparison) -> list[str]:
    assert one.ci95 is not None
    assert one.before
    low, high = (100 * value / abs(one.before) for value in (one.ci95.low, one.ci95.high))
    pattern = ",.0f" if one.measure == "samples_per_s" else ".4g"
    return [
        one.model,
        one.mode,
        "speed" if one.measure == "samples_per_s" else one.measure,
        number(one.before, pattern),
        number(one.now, pattern),
        f"{low:+.1f} to {high:+.1f} %",
        one.verdict,
    ]


def verdict_line(comparisons: Sequence[ReferenceComparison]) -> str:
    compared = sum(one.verdict != NOT_COMPARED for one in comparisons)
    regressions = sum(one.verdict == REGRESSION for one in comparisons)
    return f"{compared} compared, {regressions} regression{'' if regressions == 1 else 's'}"
