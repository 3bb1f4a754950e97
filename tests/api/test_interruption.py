"""SIGINT and SIGTERM to a run of `train()`: it stops in order, can be resumed, and the program ends as it should."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import outrider
from outrider.launch import interruption
from outrider.launch.interruption import SignalGuard
from outrider.record.checkpoint_files import epoch_of

pytestmark = pytest.mark.slow

Trainer = Callable[..., outrider.Run]
ReadJson = Callable[[Path], Any]
SIGNALS = (signal.SIGINT, signal.SIGTERM)

PROGRAM = """
import os, sys, time, torch, outrider
from pathlib import Path

def step(model, batch):
    if {seconds} > 1:
        (folder / "ready").touch()
    time.sleep({seconds})
    return (model(batch[0]) - batch[1]).square().mean()

folder = Path(sys.argv[1])
x = torch.randn(96, 4, generator=torch.Generator().manual_seed(7))
run = outrider.train(
    model=lambda: torch.nn.Linear(4, 1), optimizer=lambda p: torch.optim.SGD(p, 0.1), step=step,
    dataset=(x, x.sum(1, keepdim=True)), batch_size=4, epochs=100_000, policy="{policy}", devices="{devices}",
    run_dir=folder, grace_s={grace_s}, anchor={anchor},
)
{after}
"""
JOIN = """
next(iter(run))
(folder / "ready").touch()
run.join()
"""
BODY = """
for epoch in run:
    (folder / "ready").touch()
    while True:
        time.sleep(0.1)
"""


class Program:
    """A user's program that trains."""

    def __init__(self, folder: Path, *, starter: tuple[str, ...] = (), after: str = JOIN, **settings: Any) -> None:
        values = {"seconds": 0.001, "policy": "cadence", "devices": "cpu,cpu@0.5", "grace_s": 25, "anchor": 2}
        script = folder.with_name("program.py")
        script.write_text(PROGRAM.format(after=after, **{**values, **settings}))
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, *starter, str(script), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        while not (folder / "ready").exists():
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def send_to_all(self, number: signal.Signals) -> None:
        for process in (self.process, *psutil.Process(self.process.pid).children(recursive=True)):
            process.send_signal(number)

    def end(self) -> str:
        """What it said on stderr."""
        _, told = self.process.communicate(timeout=300)
        return told


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("epoch*"))


def interrupted(folder: Path) -> str:
    epochs = epoch_of(newest(folder))
    place = f"after {epochs} epoch{'' if epochs == 1 else 's'}" if epochs else "in the first epoch"
    return f'outrider: interrupted {place}; pass resume="{folder}" to go on\n'


def test_sigterm_to_the_starter_stops_the_run_with_a_checkpoint(tmp_path: Path, read_json: ReadJson) -> None:
    program = Program(tmp_path / "run")
    program.send(signal.SIGTERM)
    told = program.end()
    assert program.process.returncode == 143
    assert told == (
        "outrider: SIGTERM: stopping at the next average within 25 s; again to end at once\n"
        + interrupted(program.folder)
    )
    assert read_json(program.folder / "record.json")["status"] == "interrupted"
    assert (program.folder / "timeline.json").is_file()
    assert (program.folder / "model.safetensors").is_file()


def test_sigterm_to_all_processes_of_a_job_does_the_same(tmp_path: Path, read_json: ReadJson) -> None:
    program = Program(tmp_path / "run", policy="async")
    program.send_to_all(signal.SIGTERM)
    told = program.end()
    assert program.process.returncode == 143
    assert interrupted(program.folder) in told
    assert read_json(program.folder / "record.json")["status"] == "interrupted"


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_the_program_is_at_something_else_ends_both_in_order(
    tmp_path: Path, read_json: ReadJson, number: signal.Signals
) -> None:
    program = Program(tmp_path / "run", after=BODY, devices="cpu")
    program.send(number)
    told = program.end()
    assert program.process.returncode == (143 if number == signal.SIGTERM else -signal.SIGINT)
    assert told.endswith(interrupted(program.folder))
    assert read_json(program.folder / "record.json")["status"] == "interrupted"
    assert newest(program.folder).is_dir()


STARTED = """
import os, signal, sys
import outrider.api.train as training

launch = training.launch

def launch_and_interrupt(*arguments, **options):
    ranks = launch(*arguments, **options)
    os.kill(os.getpid(), signal.SIGINT)
    return ranks

training.launch = launch_and_interrupt
"""


def test_ctrl_c_while_ranks_start_ends_the_run_in_order(tmp_path: Path, read_json: ReadJson) -> None:
    folder = tmp_path / "run"
    values = {"seconds": 0.001, "policy": "cadence", "devices": "cpu,cpu", "grace_s": 25, "anchor": 2}
    (tmp_path / "program.py").write_text(STARTED + PROGRAM.format(after="run.join()", **values))
    command = [sys.executable, str(tmp_path / "program.py"), str(folder)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ended.returncode == -signal.SIGINT
    first, last = ended.stderr.splitlines()
    assert first == "outrider: SIGINT: stopping at the next average within 25 s; again to end at once"
    assert last.startswith("outrider: interrupted")
    assert read_json(folder / "record.json")["status"] == "interrupted"


def test_a_second_signal_ends_the_run_at_once(tmp_path: Path, read_json: ReadJson) -> None:
    program = Program(tmp_path / "run", seconds=600, after="run.join()", devices="cpu", grace_s=600)
    program.send(signal.SIGTERM)
    time.sleep(interruption.REPEAT_S + 0.2)
    program.send(signal.SIGTERM)
    told = program.end()
    assert program.process.returncode == 143
    assert told == ("outrider: SIGTERM: stopping at the next average within 600 s; again to end at once\n")
    assert read_json(program.folder / "record.json")["status"] == "interrupted"


def test_ranks_that_do_not_stop_within_the_grace_period_are_ended(tmp_path: Path, read_json: ReadJson) -> None:
    program = Program(tmp_path / "run", seconds=600, after="run.join()", grace_s=0.5)
    program.send(signal.SIGTERM)
    told = program.end()
    assert program.process.returncode == 143
    assert told == (
        "outrider: SIGTERM: stopping at the next average within 0.5 s; again to end at once\n"
        f"outrider: interrupted; {program.folder} has no checkpoint to go on from\n"
    )
    assert read_json(program.folder / "record.json")["status"] == "interrupted"


def test_ranks_of_torchrun_stop_together_when_it_is_told_to_end(tmp_path: Path, read_json: ReadJson) -> None:
    starter = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--no-python", sys.executable)
    program = Program(tmp_path / "run", starter=starter)
    program.send(signal.SIGTERM)
    told = program.end()
    assert program.process.returncode != 0
    assert interrupted(program.folder) in told
    assert read_json(program.folder / "record.json")["status"] == "interrupted"


# Ranks that get a signal themselves


def test_a_signal_to_one_rank_stops_all_and_the_run_can_be_resumed(
    train_two: Trainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, read_json: ReadJson
) -> None:
    options: dict[str, Any] = {"policy": "sync", "epochs": 4}
    monkeypatch.setenv("OUTRIDER_FAULTS", "rank=1,at=step,n=9,do=sigterm")
    run = train_two(**options, run_dir=tmp_path / "cut")
    with pytest.raises(SystemExit) as ended:
        run.join()
    assert ended.value.code == 143
    assert read_json(tmp_path / "cut" / "record.json")["status"] == "interrupted"
    monkeypatch.delenv("OUTRIDER_FAULTS")
    resumed = train_two(**options, resume=tmp_path / "cut", run_dir=tmp_path / "resumed").join()
    whole = train_two(**options, run_dir=tmp_path / "whole").join()
    assert all(torch.equal(whole.state_dict[name], value) for name, value in resumed.state_dict.items())


@pytest.mark.parametrize(("action", "kind"), [("sigint", KeyboardInterrupt), ("sigterm", SystemExit)])
def test_a_signal_to_the_only_rank_is_raised_once_its_checkpoint_is_written(
    train_here: Trainer,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    read_json: ReadJson,
    action: str,
    kind: type[BaseException],
) -> None:
    monkeypatch.setenv("OUTRIDER_FAULTS", f"rank=0,at=step,n=3,do={action}")
    run = train_here(epochs=5, anchor=2, speed_hints=[1])
    with pytest.raises(kind):
        run.join()
    told = capfd.readouterr().err
    assert told == (
        f"outrider: fault on rank 0 at step 3: {action}\n"
        f"outrider: {action.upper()}: stopping at the next average; again to end at once\n" + interrupted(run.run_dir)
    )
    assert read_json(run.run_dir / "record.json")["status"] == "interrupted"
    assert sum(epoch.samples for epoch in run.epochs) == 32
    assert [signal.getsignal(number) for number in SIGNALS] == [signal.default_int_handler, signal.SIG_DFL]


# Handlers


def test_handlers_are_put_back_when_the_run_has_ended(train_two: Trainer, tmp_path: Path) -> None:
    run = train_two(devices="cpu", run_dir=tmp_path)
    assert signal.getsignal(signal.SIGTERM) is interruption._handle
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    run.join()
    assert [signal.getsignal(number) for number in SIGNALS] == [signal.default_int_handler, signal.SIG_DFL]


def test_a_handler_of_the_user_stays(train_two: Trainer, tmp_path: Path) -> None:
    def handler(number: int, frame: object) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGTERM, handler)
    try:
        train_two(devices="cpu", run_dir=tmp_path).join()
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_run_in_another_thread_leaves_signals_alone(train_two: Trainer, tmp_path: Path) -> None:
    ended: list[int] = []

    def train() -> None:
        ended.append(len(train_two(devices="cpu", run_dir=tmp_path).join().epochs))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert ended == [1]


def test_the_same_signal_twice_in_a_moment_counts_once() -> None:
    heard: list[signal.Signals] = []
    with SignalGuard(heard.append, on_repeat=heard.append):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [signal.SIGTERM]


def test_two_guards_hear_of_one_signal_and_the_last_puts_the_handler_back() -> None:
    heard: list[str] = []
    first = SignalGuard(lambda number: heard.append("first")).open()
    second = SignalGuard(lambda number: heard.append("second")).open()
    os.kill(os.getpid(), signal.SIGTERM)
    first.close()
    assert signal.getsignal(signal.SIGTERM) is interruption._handle
    second.close()
    assert heard == ["first", "second"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_process_forked_under_a_guard_dies_of_sigterm_as_ever() -> None:
    ready_fd, tells_fd = os.pipe()
    with SignalGuard(lambda number: None):
        pid = os.fork()
        if pid == 0:
            os.write(tells_fd, b"x")
            time.sleep(60)
            os._exit(0)
        os.read(ready_fd, 1)
        os.kill(pid, signal.SIGTERM)
        _, status = os.waitpid(pid, 0)
    os.close(ready_fd)
    os.close(tells_fd)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM


def test_an_interrupt_in_a_with_block_stops_the_run_with_a_checkpoint(
    train_two: Trainer, tmp_path: Path, read_json: ReadJson
) -> None:
    def train() -> None:
        with train_two(devices="cpu", epochs=1_000_000, run_dir=tmp_path) as run:
            next(iter(run))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert read_json(tmp_path / "record.json")["status"] == "interrupted"
    assert newest(tmp_path).is_dir()
