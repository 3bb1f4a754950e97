"""What `bench run` and `bench sweep` print when they are done: a table per model for 80 columns, and one document.

Decides what is shown at a glance; the whole of it is in the report. Knows no torch. Called by the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.bench.report.model_tables import evaluation, time_to_target
from outrider.bench.report.timing_words import epochs_words, timing_hint
from outrider.bench.suite.groups import Group, group_runs
from outrider.bench.suite.runs import SuiteRun
from outrider.bench.suite.summary import ModeSummary, document, ideal_samples_per_s, summarise_group
from outrider.bench.tables import UNKNOWN, number, text_table

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
    """The last line of stdout."""
    return {"schema_version": SCHEMA_VERSION, "models": document(group_runs(runs)), "failures": list(failures)}
