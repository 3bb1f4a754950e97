"""Runs many cases, one after the other or several at a time; skips finished cases and reports failures.

Decides the order of rounds, the remaining cases, when each starts, and the estimate of the remaining time. Runs that
share the machine are not timed. `run_case` runs a case, the watcher shows progress. Called by `bench run` and `bench
sweep`.
"""

from __future__ import annotations

import shutil
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from outrider.bench.statistics import mean
from outrider.bench.suite.run_case import Planned, can_go_on, finished_run, run_case
from outrider.bench.suite.runs import Case, SuiteRun
from outrider.bench.suite.workers import Workers
from outrider.errors import OutriderError
from outrider.machine.devices import DeviceSpec, parse_devices
from outrider.slices.mps import daemon_for
from outrider.world.messages import Message


class Eta:
    """Learns from each run that ended; runs of the same model and mode take about as long as each other."""

    def __init__(self, cases: Sequence[Case], *, num_jobs: int = 1) -> None:
        self._left = list(cases)
        self._num_jobs = num_jobs
        self._seconds: dict[tuple[str, str], list[float]] = defaultdict(list)

    @property
    def num_left(self) -> int:
        return len(self._left)

    def skipped(self, case: Case) -> None:
        self._left.remove(case)

    def ended(self, case: Case, seconds: float) -> None:
        self._left.remove(case)
        self._seconds[case.model, case.mode].append(seconds)

    def left_s(self, *, elapsed_s: float = 0.0) -> float | None:
        """Estimated seconds to the end of the sweep, with `elapsed_s` of running cases; None before the first ends."""
        if not self._seconds or not self._left:
            return None if self._left else 0.0
        of_all_s = max(0.0, sum(self._expected_s(case) for case in self._left) - elapsed_s)
        return of_all_s / min(self._num_jobs, len(self._left))

    def _expected_s(self, case: Case) -> float:
        """From runs like it: of this model and mode, else of this model, else of any."""
        for alike in (
            self._seconds.get((case.model, case.mode), ()),
            [one for (model, _), known in self._seconds.items() if model == case.model for one in known],
            [one for known in self._seconds.values() for one in known],
        ):
            if alike:
                return mean(list(alike))
        raise AssertionError("asked only when a run has ended")


def duration(seconds: float) -> str:
    """Format a duration: 45 s, 7 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


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
    """Run all cases; after an interrupt the same call continues with the remaining ones."""
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


def run_sweep_beside(planned: Sequence[Planned], *, output: Path, watcher: SweepWatcher, num_jobs: int) -> Swept:
    """Run all cases, `num_jobs` at a time; after an interrupt the same call continues with the remaining ones."""
    assert not any(one.case.is_timed for one in planned), "what runs beside others cannot be timed"
    runs: list[SuiteRun] = []
    failures: list[tuple[Case, OutriderError]] = []
    waiting: deque[Planned] = deque()
    # Skipped cases are reported first.
    for one in in_rounds(planned):
        if (run := finished_run(output / one.case.folder, one)) is None:
            waiting.append(one)
        else:
            watcher.skipped(one.case)
            runs.append(run)
    # Daemons of one GPU would take turns: one serves all runs.
    with daemon_for(_devices(waiting)) as variables, Workers(variables) as workers:
        while waiting or workers.num_busy:
            while waiting and workers.num_busy < num_jobs:
                one = waiting.popleft()
                watcher.begin(one.case)
                make_way(output / one.case.folder, one.case)
                workers.start(one, output / one.case.folder)
            for case, told in workers.hear():
                if isinstance(told, SuiteRun):
                    runs.append(told)
                    watcher.ended(told)
                elif isinstance(told, OutriderError):
                    failures.append((case, told))
                    watcher.failed(case, told)
                else:
                    watcher.saw(case, told)
    return Swept(runs=tuple(runs), failures=tuple(failures))


def _devices(planned: Sequence[Planned]) -> list[DeviceSpec]:
    """Of all cases together: one daemon serves whatever slices are among them."""
    return [spec for one in planned for spec in parse_devices(one.case.devices)]
