"""A starter that is stopped for a while (Ctrl-Z): its ranks go on, and none of its deadlines passes meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outrider.launch import ranks as ranks_module
from outrider.launch.ranks import WatchClock
from outrider.world.messages import Message, PipeWriter, decode

STARTER = """
import os, sys, time
from pathlib import Path
from outrider.machine.devices import parse_devices
from outrider.launch.launcher import launch

def work(link, folder):
    link.send("ready", pid=os.getppid())
    while not (folder / "stopped").exists():
        time.sleep(0.01)
    for number in range(1_000):
        link.send("progress", number=number, ballast="x" * 1_000)
        link.send("epoch", number=number, ballast="x" * 100)
    (folder / "worked").touch()

folder = Path(sys.argv[1])
with launch(work, {"folder": folder}, devices=parse_devices("cpu"), log_dir=folder) as ranks:
    messages = ranks.messages()
    next(messages)
    (folder / "ready").touch()
    epochs = [message.fields["number"] for message in messages if message.kind == "epoch"]
    ranks.raise_error()
print(epochs == list(range(1_000)))
"""


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def test_ranks_work_on_while_their_starter_is_stopped_and_no_epoch_is_lost(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as starter:
        wait_for(tmp_path / "ready")
        os.kill(starter.pid, signal.SIGSTOP)
        (tmp_path / "stopped").touch()
        wait_for(tmp_path / "worked")
        os.kill(starter.pid, signal.SIGCONT)
        told, _ = starter.communicate(timeout=300)
    assert (told, starter.returncode) == ("True\n", 0)


def test_a_pause_of_the_whole_process_counts_as_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(ranks_module.time, "monotonic", lambda: now_s)
    clock = WatchClock()
    now_s = 100.25
    clock.advance()
    now_s = 170.25
    clock.advance()
    assert clock.now_s == 0.25 + ranks_module.LONGEST_TURN_S


def test_a_full_pipe_drops_progress_and_keeps_the_rest_in_order() -> None:
    reads_fd, writes_fd = os.pipe()
    deliver = PipeWriter(writes_fd)
    for number in range(300):
        deliver(Message(rank=0, kind="epoch", fields={"number": number, "ballast": "x" * 1_000}))
        deliver(Message(rank=0, kind="progress", fields={"number": number}))
    got = b""
    while got.count(b'"epoch"') < 300:
        got += os.read(reads_fd, 65_536)
        deliver(Message(rank=0, kind="watch", fields={"is_on": True}))
    os.close(reads_fd)
    os.close(writes_fd)
    messages = [decode(line, rank=0) for line in got.split(b"\n")[:-1]]
    assert [message.fields["number"] for message in messages if message.kind == "epoch"] == list(range(300))
    assert sum(message.kind == "progress" for message in messages) < 100
