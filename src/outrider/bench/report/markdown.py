"""The report in markdown: hardware and settings, the results of each mode, and what is not known.

Decides the order of sections and their words; numbers come from the summaries, verdicts from `claims`. Reads records
only and imports no torch. Called by `bench report`.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.bench.report import model_tables as tables
from outrider.bench.report.claims import ACCURACY_MARGIN, MIN_SEEDS, RELATIVE_MARGIN, best_mode, quality, shortcomings
from outrider.bench.report.model_tables import ReportTable, epochs_words, seeds_words
from outrider.bench.suite.groups import Group, group_runs
from outrider.bench.suite.runs import SuiteRun, read_runs
from outrider.bench.suite.suite_summary import ModeSummary, ideal_samples_per_s, summarise_group
from outrider.bench.tables import UNKNOWN, markdown_table, number
from outrider.errors import DataError

MACHINE = ("cpu", "num_cores", "gpus", "cuda", "platform")
VERSIONS = ("outrider", "torch", "python")
SOME_JOBS = 2
"""Of untimed runs, to reproduce them: how many there were at a time is kept nowhere, and makes no difference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Everything a report says, before it is laid out."""

    groups: tuple[Group, ...]
    summaries: tuple[dict[str, ModeSummary], ...]
    """Of each group, by mode."""
    environments: tuple[Mapping[str, Any], ...]
    """The distinct environments of the runs; one if all ran on one machine with the same versions."""
    commits: tuple[str, ...]

    @property
    def pairs(self) -> list[tuple[Group, dict[str, ModeSummary]]]:
        return list(zip(self.groups, self.summaries, strict=True))

    @property
    def num_finished(self) -> int:
        return sum(len(group.runs) for group in self.groups)

    @property
    def num_untimed(self) -> int:
        return sum(not run.case.is_timed for group in self.groups for run in group.runs)

    @property
    def incomplete(self) -> list[SuiteRun]:
        return [run for group in self.groups for run in group.incomplete]


def make_report(root: Path) -> Report:
    """The report on the runs in a folder; an error if no run is finished."""
    runs = read_runs(root)
    groups = tuple(group_runs(runs))
    if not any(group.by_mode for group in groups):
        count = f"{len(runs)} run{'' if len(runs) == 1 else 's'} begun" if runs else "no run of the suite is there"
        raise DataError(
            f"nothing is finished in {root}: {count}", hint="run `outrider bench sweep`; it goes on where it stopped"
        )
    finished = [run for group in groups for run in group.runs]
    return Report(
        groups=groups,
        summaries=tuple(summarise_group(group) for group in groups),
        environments=tuple(_different([_told(run.environment) for run in finished])),
        commits=tuple(sorted({run.commit for run in finished if run.commit})),
    )


def _told(environment: Mapping[str, Any]) -> dict[str, Any]:
    return {name: environment.get(name) for name in (*MACHINE, *VERSIONS)}


def _different(environments: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({str(sorted(one.items(), key=str)): one for one in environments}.values())


# Laid out


def markdown(report: Report) -> str:
    """The whole report."""
    parts = [
        "# Benchmark report",
        lead(report),
        "## Hardware and versions",
        *(_table(_environment_table(one)) for one in report.environments),
        f"Commit: {', '.join(report.commits)}." if report.commits else "",
        "## Reproduce",
        "```\n" + "\n".join(reproduce(report)) + "\n```",
        "## Best mode per model",
        _table(overview(report)),
        *(part for group, summaries in report.pairs for part in _model_parts(group, summaries)),
        "## Where a mode is worse than one device alone",
        _bullets(worse_sentences(report), otherwise="Nowhere in these runs, as far as they can tell."),
        "## Incomplete runs",
        _bullets(incomplete_sentences(report), otherwise="None."),
        "## Notes",
        _bullets(notes(report), otherwise=""),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def lead(report: Report) -> str:
    models = ", ".join(group.name for group in report.groups)
    devices = " and ".join(dict.fromkeys(", ".join(group.case.devices) for group in report.groups))
    untimed = f", {report.num_untimed} of them for quality only and not timed" if report.num_untimed else ""
    incomplete = f", {len(report.incomplete)} incomplete" if report.incomplete else ""
    return f"{report.num_finished} finished runs{untimed}{incomplete}; models: {models}; devices: {devices}."


def _environment_table(environment: Mapping[str, Any]) -> ReportTable:
    rows = [[name.replace("_", " "), fact(environment[name])] for name in (*MACHINE, *VERSIONS)]
    return ReportTable(title="", headers=("what", "here"), rows=rows)


def fact(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return UNKNOWN if value is None else str(value)


def reproduce(report: Report) -> list[str]:
    """One command per condition; finished runs are skipped, so that it may be called again."""
    models_by_rest: dict[str, list[str]] = {}
    for group in report.groups:
        for rest in _all_conditions_words(group):
            models_by_rest.setdefault(rest, []).append(group.case.model)
    begin = "outrider bench sweep --preset full"
    return [f"{begin} --models {','.join(models)} {rest}" for rest, models in models_by_rest.items()]


def _all_conditions_words(group: Group) -> list[str]:
    """The commands of the timed runs, and of the runs that may share the machine."""
    runs = [*group.runs, *group.incomplete]
    timed = [run for run in runs if run.case.is_timed]
    untimed = [run for run in runs if not run.case.is_timed]
    found = [_conditions_words(timed)] if timed else []
    return [*found, f"{_conditions_words(untimed)} --jobs {SOME_JOBS}"] if untimed else found


def _conditions_words(runs: Sequence[SuiteRun]) -> str:
    case = runs[0].case
    by_mode = Counter(run.case.mode for run in runs if run.is_finished)
    modes = [*by_mode, *(run.case.mode for run in runs)]
    words = ["--modes", ",".join(dict.fromkeys(modes)), "--devices", ",".join(case.devices)]
    words += ["--seeds", str(max(by_mode.values(), default=0)), "--epochs", str(case.epochs)]
    words += ["--batch-size", str(case.batch_size)]
    words += ["--samples", str(case.max_samples)] if case.max_samples else []
    words += ["--depth", str(case.depth)] if case.depth else []
    words += [word for name, value in case.settings.items() for word in ("--set", f"{name}={value}")]
    return shlex.join(words)


def overview(report: Report) -> ReportTable:
    headers = ("model", "data", "best mode", "why", "speed-up", "efficiency", "quality")
    return ReportTable(title="", headers=headers, rows=[_overview_row(*pair) for pair in report.pairs])


def _overview_row(group: Group, summaries: Mapping[str, ModeSummary]) -> list[str]:
    best = best_mode(group, summaries)
    summary = summaries.get(best.mode or "")
    verdicts = {one.mode: one.verdict for one in quality(group, summaries)}
    return [
        group.name,
        group.case.data_name,
        best.mode or UNKNOWN,
        best.reason,
        UNKNOWN if summary is None or summary.speedup is None else f"{summary.speedup:.2f}x",
        number(summary.efficiency if summary else None, ".2f"),
        verdicts.get(best.mode or "", UNKNOWN),
    ]


def _model_parts(group: Group, summaries: Mapping[str, ModeSummary]) -> list[str]:
    return [
        f"## {group.name}",
        conditions(group, summaries),
        *(
            part
            for table in model_tables(group, summaries)
            for part in (f"### {table.title}", _table(table), table.note)
        ),
    ]


def model_tables(group: Group, summaries: Mapping[str, ModeSummary]) -> list[ReportTable]:
    """The tables of a model that have something to show."""
    found = [
        tables.results_table(group, summaries),
        tables.quality_table(group, summaries),
        tables.averages_table(summaries),
        tables.idle_table(summaries),
        tables.memory_table(summaries),
    ]
    return [table for table in found if table.rows]


def conditions(group: Group, summaries: Mapping[str, ModeSummary]) -> str:
    """A description of the task, and its published figure."""
    case, subject = group.case, group.subject
    words = [
        f"{case.data_name}; {epochs_words(group)}, batch {case.batch_size}; devices {', '.join(case.devices)}; "
        f"up to {seeds_words(group)} per mode.",
        f"Ideal: {number(ideal_samples_per_s(group), ',.0f')} samples/s, the sum of {' + '.join(group.solos)}.",
    ]
    if subject.is_stand_in:
        words.append("The data are a stand-in: no published figure applies.")
    elif subject.published is not None:
        words.append(_beside_published(group, summaries, subject.published))
    return " ".join(words)


def _beside_published(group: Group, summaries: Mapping[str, ModeSummary], published: float) -> str:
    subject = group.subject
    sign = 1.0 if subject.larger_is_better else -1.0
    known = {mode: one.eval for mode, one in summaries.items() if one.eval is not None}
    missed = [mode for mode, value in known.items() if sign * value < sign * published]
    value = tables.evaluation(published, None, metric=subject.metric)
    every = "every mode that was judged" if group.has_untimed else "every mode"
    verdict = f"not reached, in the mean, by {', '.join(missed)}" if missed else f"reached, in the mean, by {every}"
    return f"Published: {subject.metric} {value}; {verdict}."


def worse_sentences(report: Report) -> list[str]:
    return [sentence for pair in report.pairs for sentence in shortcomings(*pair)]


def incomplete_sentences(report: Report) -> list[str]:
    return [
        f"{run.case.title} {run.case.mode} seed {run.case.seed}: {run.status or 'no record'} "
        f"after {len(run.epochs)} of {run.case.epochs} epochs{f': {run.error}' if run.error else ''}"
        for run in report.incomplete
    ]


def notes(report: Report) -> list[str]:
    stand_ins = sorted({group.case.data_name for group in report.groups if group.subject.is_stand_in})
    found = [
        "Samples per second are of training time; the first epoch is warm-up and not counted where there are more.",
        "Efficiency is throughput against the sum of the solos, its 95 % interval Student's over the rounds (of a "
        "single round: by drawing its epochs again); of ceiling is throughput against `independent`, all devices at "
        "work without averaging. Speed-up is against solo-0.",
        "Time to target is training time, warm-up included, to the end of the first epoch that reached it; the mean "
        "over the seeds, where all of them did.",
        "Evaluations are of the last epoch: mean ± half of the 95 % Student interval over the seeds.",
        '"As good as solo" is said where two one-sided tests put the difference within '
        f"{100 * ACCURACY_MARGIN:g} points of accuracy, or {100 * RELATIVE_MARGIN:g} % of a loss, at 5 %, with "
        f"{MIN_SEEDS} seeds or more.",
        "Idle times by cause are the waits that the ranks recorded; peers record only their sum, as waiting for "
        "averages. Sampled is what NVML or psutil saw every 100 ms: below 5 % for half a second or more. "
        "Memory is a rank's peak: what torch allocated on a GPU, the process's resident memory on a CPU.",
    ]
    if report.num_untimed:
        found.append("Runs that were not timed tell of quality only; the note under the table of results says which.")
    if len(report.environments) > 1:
        found.append("Runs of unlike machines or versions are in this folder: speeds of different ones do not compare.")
    found += [f"{name}: made by the program, not the data set; only its own runs compare." for name in stand_ins]
    return [*found, *_peer_notes(report)]


def _peer_notes(report: Report) -> list[str]:
    """How each peer was set."""
    runs = [run for group in report.groups for run in group.runs]
    return sorted({f"`{run.case.mode}`: {run.note}." for run in runs if run.note})


def _table(table: ReportTable) -> str:
    return markdown_table(table.headers, table.rows)


def _bullets(sentences: Sequence[str], *, otherwise: str) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences) or otherwise
