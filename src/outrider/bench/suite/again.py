"""A run and its repetition side by side.

Decides what is compared and when the two are called the same. Knows no torch. Called by `bench rerun`.
"""

from __future__ import annotations

from outrider.bench.measures import samples_per_s
from outrider.bench.suite.runs import SuiteRun
from outrider.bench.tables import number, text_table


def render_again(before: SuiteRun, now: SuiteRun) -> str:
    """What was, what is, and whether every epoch was the same to the bit."""
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
