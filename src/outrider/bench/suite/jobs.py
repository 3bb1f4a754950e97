"""Runs cases several at a time, for accuracy alone: what runs beside others says nothing about speed.

Decides who begins when and what becomes of what workers tell; a worker's life is its own module's business, what a case
does the suite's. Called by `bench run` and `bench sweep` where --jobs is more than one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from outrider.bench.suite.case import Case
from outrider.bench.suite.run import Planned, finished_run
from outrider.bench.suite.runs import SuiteRun
from outrider.bench.suite.sweep import SweepWatcher, Swept, in_rounds, make_way
from outrider.bench.suite.workers import Workers
from outrider.errors import OutriderError
from outrider.machine.devices import DeviceSpec, parse_devices
from outrider.runtime.mps import daemon_for


def run_sweep_beside(planned: Sequence[Planned], *, output: Path, watcher: SweepWatcher, num_jobs: int) -> Swept:
    """All cases, `num_jobs` at a time; an interrupt leaves what is finished, and the same call goes on from there."""
    assert not any(one.case.is_timed for one in planned), "what runs beside others cannot be timed"
    runs: list[SuiteRun] = []
    failures: list[tuple[Case, OutriderError]] = []
    waiting: deque[Planned] = deque()
    # What is done is told first, so that nothing but runs comes after.
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
