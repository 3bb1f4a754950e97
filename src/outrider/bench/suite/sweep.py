"""Runs many cases, one after the other, each once: what is done is skipped, what failed is told and passed over.

Decides the order of rounds and what is left to do; what a case does is the suite's business, showing it the
watcher's. Called by `bench run` and `bench sweep`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from outrider.bench.suite.case import Case
from outrider.bench.suite.run import Planned, can_go_on, finished_run, run_case
from outrider.bench.suite.runs import SuiteRun
from outrider.errors import OutriderError
from outrider.runtime.messages import Message


class SweepWatcher(Protocol):
    """Sees the sweep as it goes."""

    def skipped(self, case: Case) -> None: ...

    def begin(self, case: Case) -> None: ...

    def saw(self, case: Case, message: Message) -> None: ...

    def ended(self, run: SuiteRun) -> None: ...

    def failed(self, case: Case, error: OutriderError) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Swept:
    """A sweep that came to its end."""

    runs: tuple[SuiteRun, ...]
    """Finished, those that were skipped included."""
    failures: tuple[tuple[Case, OutriderError], ...]


def in_rounds(planned: Sequence[Planned]) -> list[Planned]:
    """Seeds outermost, then models, modes innermost: a noisy hour hurts all modes alike."""
    models = list(dict.fromkeys(one.case.model for one in planned))
    modes = list(dict.fromkeys(one.case.mode for one in planned))
    return sorted(planned, key=lambda one: (one.case.seed, models.index(one.case.model), modes.index(one.case.mode)))


def run_sweep(planned: Sequence[Planned], *, output: Path, watcher: SweepWatcher) -> Swept:
    """All cases; an interrupt leaves what is finished, and the same call goes on from there."""
    runs: list[SuiteRun] = []
    failures: list[tuple[Case, OutriderError]] = []
    for one in in_rounds(planned):
        folder = output / one.case.folder
        if (run := finished_run(folder, one)) is not None:
            watcher.skipped(one.case)
            runs.append(run)
            continue
        watcher.begin(one.case)
        make_way(folder, one.case)
        try:
            runs.append(run_case(one, folder, on_message=partial(watcher.saw, one.case)))
            watcher.ended(runs[-1])
        except OutriderError as error:
            failures.append((one.case, error))
            watcher.failed(one.case, error)
    return Swept(runs=tuple(runs), failures=tuple(failures))


def make_way(folder: Path, case: Case) -> None:
    """The key in its name says whose it is: an earlier try of this very case that did not get to its end."""
    if not can_go_on(folder, case):
        shutil.rmtree(folder, ignore_errors=True)
