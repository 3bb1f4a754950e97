"""What `bench run`, `bench sweep` and `bench rerun` print when they are done: tables for 80 columns, and one document.

Decides what is shown, and when a run and its repetition count as equal; the report has all details. Imports no torch.
Called by the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.bench.measures import samples_per_s
from outrider.bench.report.model_tables import epochs_words, evaluation, time_to_target, timing_hint
from outrider.bench.suite.groups import Group, group_runs
from outrider.bench.suite.runs import SuiteRun
from outrider.bench.suite.suite_summary import ModeSummary, document, ideal_samples_per_s, summarise_group
from outrider.bench.tables import UNKNOWN, number, text_table
from outrider.errors import MissingExtraError

SCHEMA_VERSION = 1


def render_runs(runs: Sequence[SuiteRun]) -> str:
    """Every model's modes, with what they are measured against."""
    return "\n\n".join(_render_group(group) for group in group_runs(runs))


def _render_group(group: Group) -> str:
    case, subject = group.case, group.subject
    head = f"{group.name} on {case.data_name}: {epochs_words(group)}, batch {case.batch_size}"
    unit = " %" if subject.metric == "accuracy" else ""
    headers = ("mode", f"{subject.metric}{unit}", "samples/s", "effic.", "speed-up", "to target")
    rows = [_row(group, one) for one in summarise_group(group).values()]
    ideal = f"ideal {number(ideal_samples_per_s(group), ',.0f')} samples/s ({' + '.join(group.solos)})"
    foot = f"{ideal}; target {number(subject.target, 'g')}"
    notes = [timing_hint(group)] if group.has_untimed else []
    return "\n".join([head, text_table(headers, rows), foot, *notes])


def _row(group: Group, summary: ModeSummary) -> list[str]:
    has_target = group.subject.target is not None
    return [
        summary.mode,
        evaluation(summary.eval, summary.eval_ci95, metric=group.subject.metric).removesuffix(" %"),
        number(summary.samples_per_s, ",.0f"),
        UNKNOWN if summary.mode.startswith("solo-") else number(summary.efficiency, ".2f"),
        UNKNOWN if summary.speedup is None else f"{summary.speedup:.2f}x",
        time_to_target(summary, has_target=has_target).removeprefix("reached by "),
    ]


def runs_document(runs: Sequence[SuiteRun], *, failures: Sequence[str]) -> dict[str, Any]:
    """The last line of stdout; `models` is None if scipy is missing, which their intervals need."""
    try:
        models = document(group_runs(runs))
    except MissingExtraError:
        models = None
    return {"schema_version": SCHEMA_VERSION, "models": models, "failures": list(failures)}


def render_again(before: SuiteRun, now: SuiteRun) -> str:
    """Both results, and whether every epoch was equal to the bit."""
    rows = [
        [
            name,
            number(run.epochs[-1].eval, ".6f") if run.epochs else "-",
            number(run.epochs[-1].loss, ".6f") if run.epochs else "-",
            number(samples_per_s(run.epochs), ",.0f") if run.epochs and run.case.is_timed else "-",
        ]
        for name, run in (("before", before), ("now", now))
    ]
    return "\n".join([text_table(("run", now.subject.metric, "loss", "samples/s"), rows), _verdict(before, now)])


def _verdict(before: SuiteRun, now: SuiteRun) -> str:
    if not before.is_finished:
        return (
            f"the run before was not finished ({before.status or 'no record'}), so there is nothing to hold it against"
        )
    same = [(epoch.loss, epoch.eval) for epoch in before.epochs] == [(epoch.loss, epoch.eval) for epoch in now.epochs]
    if same:
        return "every epoch's loss and evaluation are the same to the bit"
    return "not the same to the bit: which rank takes which sample follows the clock, except for solos and sync"
