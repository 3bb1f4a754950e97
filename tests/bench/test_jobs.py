"""Several cases at a time, each in a real worker: they overlap, fail alone and end with their starter."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from outrider import errors
from outrider.bench.datasets.source import DataSource
from outrider.bench.suite.run_case import Planned, finished_run
from outrider.bench.suite.runs import SuiteRun, read_run
from outrider.bench.suite.suite_plan import SuiteRequest, plan
from outrider.bench.suite.sweep import Swept, run_sweep_beside
from outrider.errors import OutriderError, StepError
from outrider.machine.devices import parse_devices
from outrider.slices import mps

pytestmark = pytest.mark.slow

REQUEST = SuiteRequest(
    models=("logistic",),
    modes=("solo-0", "solo-1"),
    devices=parse_devices("cpu,cpu@0.5"),
    data=DataSource(may_download=False, max_samples=64),
    num_seeds=2,
    epochs=1,
    batch_size=16,
    is_timed=False,
)
MakeLog = Callable[[], Any]
FAKE_MPS = Path(__file__).parents[1] / "slices" / "fake_mps_control.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """A sweep of four cases, two at a time."""

    planned: list[Planned]
    output: Path
    swept: Swept
    lines: list[str]


@pytest.fixture(scope="module")
def job_tasks() -> Iterator[ModuleType]:
    """A module that workers can import, as long as this path is theirs as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        yield importlib.import_module("job_tasks")


@pytest.fixture(scope="module")
def told(job_tasks: ModuleType, make_log: MakeLog, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Two that wait for each other; one that fails and one that is killed."""
    folder = tmp_path_factory.mktemp("jobs")
    first, second, third, fourth = plan(REQUEST)
    planned = [
        replace(first, make_task=partial(job_tasks.meet, folder / "a", folder / "b", first.make_task)),
        replace(second, make_task=partial(job_tasks.meet, folder / "b", folder / "a", second.make_task)),
        replace(third, make_task=job_tasks.fail),
        replace(fourth, make_task=job_tasks.be_killed),
    ]
    log = make_log()
    swept = run_sweep_beside(planned, output=folder / "runs", watcher=log, num_jobs=2)
    return Told(planned=planned, output=folder / "runs", swept=swept, lines=log.lines)


# Side by side


def test_two_cases_run_at_the_same_time(told: Told) -> None:
    # Each of them waited until the other was there.
    assert sorted(run.case.mode for run in told.swept.runs) == ["solo-0", "solo-1"]
    assert told.lines[:2] == ["begin solo-0 0", "begin solo-1 0"]


def test_no_more_than_asked_for_are_under_way(told: Told) -> None:
    changes = [{"begin": 1, "ended": -1, "failed": -1}.get(line.split()[0], 0) for line in told.lines]
    assert max(sum(changes[: place + 1]) for place in range(len(changes))) == 2


def test_epochs_are_told_with_the_case_they_belong_to(told: Told) -> None:
    assert {"epoch of solo-0 0", "epoch of solo-1 0"} <= set(told.lines)


def test_runs_beside_each_other_are_marked_as_not_timed(told: Told) -> None:
    runs = [read_run(told.output / one.case.folder) for one in told.planned[:2]]
    assert [run.case.is_timed for run in runs if run is not None] == [False, False]


def test_workers_run_case_after_case(job_tasks: ModuleType, make_log: MakeLog, tmp_path: Path) -> None:
    planned = [replace(one, make_task=job_tasks.refuse_by_pid) for one in plan(REQUEST)]
    swept = run_sweep_beside(planned, output=tmp_path, watcher=make_log(), num_jobs=1)
    assert len(swept.failures) == len(planned)
    assert len({error.message for _, error in swept.failures}) == 1


# Failures


def test_a_case_that_fails_leaves_the_others_alone(told: Told) -> None:
    assert "failed solo-0 1: rank 1 (cpu@0.5), step 7: ValueError: no" in told.lines
    assert {"ended solo-0 0", "ended solo-1 0"} <= set(told.lines)


def test_an_error_comes_out_of_a_worker_whole(told: Told) -> None:
    [error] = [error for case, error in told.swept.failures if case.mode == "solo-0"]
    assert type(error) is StepError
    assert (error.hint, error.rank, error.step, error.traceback) == ("say yes", 1, 7, "line 3")


def test_a_worker_that_is_killed_is_a_failed_case(told: Told) -> None:
    assert "failed solo-1 1: its process ended with exit code -9 before the run did" in told.lines
    run = read_run(told.output / told.planned[3].case.folder)
    assert run is not None
    assert (run.status, run.error) == ("failed", "its process ended with exit code -9 before the run did")


@pytest.mark.parametrize("kind", [one for one in OutriderError.__subclasses__() if one.__module__ == errors.__name__])
def test_every_error_survives_the_journey_from_a_worker(kind: type[OutriderError]) -> None:
    error = pickle.loads(pickle.dumps(kind("no", hint="yes", rank=1, step=7, traceback="line 3")))
    assert (type(error), error.message, error.hint, error.rank, error.step, error.traceback) == (
        getattr(errors, kind.__name__), "no", "yes", 1, 7, "line 3",
    )  # fmt: skip


def test_a_planned_case_travels_with_its_task() -> None:
    planned = plan(REQUEST)[-1]
    arrived: Planned = pickle.loads(pickle.dumps(planned))
    assert arrived.case == planned.case
    assert (arrived.make_task().seed, arrived.make_task().data_name) == (1, "glyphs (stand-in), first 64")


# Resuming


def test_what_is_done_is_skipped(told: Told, make_log: MakeLog) -> None:
    log = make_log()
    swept = run_sweep_beside(told.planned[:2], output=told.output, watcher=log, num_jobs=2)
    assert log.lines == ["skipped solo-0 0", "skipped solo-1 0"]
    assert len(swept.runs) == 2


def test_an_untimed_run_never_stands_for_a_timed_one(told: Told) -> None:
    alone = plan(replace(REQUEST, is_timed=True))[0]
    assert finished_run(told.output / told.planned[0].case.folder, told.planned[0]) is not None
    assert finished_run(told.output / alone.case.folder, alone) is None


# How they end

SCRIPT = """
import sys
from dataclasses import replace
from pathlib import Path
import conftest, test_jobs
from outrider.bench.suite.sweep import run_sweep_beside
from outrider.bench.suite.suite_plan import plan

class Teller(conftest.SweepLog):
    def saw(self, case, message):
        print("epoch", case.mode, flush=True)
    def ended(self, run):
        print("ended", run.case.mode, flush=True)

planned = [
    plan(replace(test_jobs.REQUEST, num_seeds=1, epochs=int(epochs)))[rank] for rank, epochs in enumerate(sys.argv[2:])
]
try:
    run_sweep_beside(planned, output=Path(sys.argv[1]), watcher=Teller(), num_jobs=2)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
FOREVER = 1_000_000


def start_sweep(output: Path, *epochs: int) -> subprocess.Popen[str]:
    """solo-0 and solo-1 for so many epochs, in a process of its own that tells what becomes of them."""
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(output), *map(str, epochs)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        start_new_session=True,
    )


def read_until(starter: subprocess.Popen[str], *wanted: str) -> None:
    assert starter.stdout is not None
    missing = set(wanted)
    while missing:
        line = starter.stdout.readline()
        assert line, f"ended before it told {missing}"
        missing.discard(line.strip())


def run_in(folder: Path) -> SuiteRun:
    [found] = folder.iterdir()
    run = read_run(found)
    assert run is not None
    return run


def test_an_interrupt_ends_workers_and_ranks_and_keeps_what_is_finished(tmp_path: Path) -> None:
    with start_sweep(tmp_path, 1, FOREVER) as starter:
        read_until(starter, "ended solo-0", "epoch solo-1")
        started = psutil.Process(starter.pid).children(recursive=True)
        # As a terminal does it: to all processes of the group at once.
        os.killpg(starter.pid, signal.SIGINT)
        stdout, stderr = starter.communicate(timeout=60)
    assert psutil.wait_procs(started, timeout=60)[1] == []
    assert stdout.splitlines()[-1] == "interrupted"
    told = "outrider: SIGINT: ", "outrider: interrupted"
    assert [line for line in stderr.splitlines() if not line.startswith(told)] == []
    assert run_in(tmp_path / "logistic" / "solo-0").is_finished
    assert run_in(tmp_path / "logistic" / "solo-1").status == "interrupted"


def test_workers_and_ranks_end_where_their_starter_is_killed(tmp_path: Path) -> None:
    with start_sweep(tmp_path, FOREVER) as starter:
        read_until(starter, "epoch solo-0")
        started = psutil.Process(starter.pid).children(recursive=True)
        starter.kill()
        starter.communicate(timeout=60)
    assert psutil.wait_procs(started, timeout=60)[1] == []
    assert run_in(tmp_path / "logistic" / "solo-0").status == "interrupted"


# Slices of a GPU


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a stand-in for NVIDIA's control program wrote down."""
    program = tmp_path / "bin" / mps.CONTROL
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {FAKE_MPS} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_MPS_JOURNAL", str(tmp_path / "journal"))
    return tmp_path / "journal"


def test_one_daemon_serves_the_slices_of_all_cases(
    journal: Path, job_tasks: ModuleType, make_log: MakeLog, tmp_path: Path
) -> None:
    request = replace(REQUEST, devices=parse_devices("cuda:0%70,cuda:0%12"), num_seeds=1)
    planned = [
        replace(one, make_task=partial(job_tasks.tell_variables, tmp_path / one.case.mode, mps.PIPES))
        for one in plan(request)
    ]
    swept = run_sweep_beside(planned, output=tmp_path / "runs", watcher=make_log(), num_jobs=2)
    assert [error.message for _, error in swept.failures] == ["there is no GPU here"] * 2
    assert (tmp_path / "solo-0").read_text() == (tmp_path / "solo-1").read_text() != f"{mps.PIPES}=None"
    assert [line.split()[0] for line in journal.read_text().splitlines()] == ["up", "quit"]
