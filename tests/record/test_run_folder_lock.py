"""One run at a time in a folder: who holds it, who is refused, and whose lock no longer counts."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.record.run_folder import RunFolder
from outrider.record.run_folder_lock import FolderLock

HOLDER = """
import sys
from pathlib import Path
from outrider.record.run_folder import RunFolder
from outrider.record.run_folder_lock import FolderLock

lock = FolderLock.take(RunFolder(Path(sys.argv[1])))
print("taken", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of `tmp_path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "taken\n"
    yield process
    process.stdin.close()
    process.wait(30)
    process.stdout.close()


def test_a_second_run_is_refused_with_the_process_and_host_of_the_first(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        FolderLock.take(RunFolder(tmp_path))
    who = re.escape(f"{tmp_path} is in use by another run: pid {holder.pid} on {socket.gethostname()}, since 20")
    assert re.match(who, caught.value.message)
    assert caught.value.hint == "wait for that run or end it, or pass another run_dir"


def test_a_second_run_of_the_same_program_is_refused_too(tmp_path: Path) -> None:
    lock = FolderLock.take(RunFolder(tmp_path))
    with pytest.raises(ConfigError, match=f"pid {os.getpid()} on "):
        FolderLock.take(RunFolder(tmp_path))
    lock.release()
    FolderLock.take(RunFolder(tmp_path)).release()
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_run_that_was_killed_is_taken_over(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait(30)
    assert json.loads((tmp_path / "lock").read_text())["pid"] == holder.pid
    FolderLock.take(RunFolder(tmp_path)).release()


def test_what_a_dead_run_had_begun_to_save_is_removed_with_its_lock(tmp_path: Path) -> None:
    staging = RunFolder(tmp_path).checkpoints / ".epoch00001-000000000000.7-abc"
    staging.mkdir(parents=True)
    FolderLock.take(RunFolder(tmp_path)).release()
    assert not staging.exists()


def test_a_lock_of_another_host_that_holds_it_no_longer_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = {"pid": 7, "host": "elsewhere", "started_at": "2026-01-01", "process_started_s": 1.0}
    (tmp_path / "lock").write_text(json.dumps(content))
    FolderLock.take(RunFolder(tmp_path)).release()
    assert capsys.readouterr().err == (
        f"outrider: {tmp_path} was locked by pid 7 on elsewhere, which holds it no longer\n"
    )


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = FolderLock.take(RunFolder(tmp_path))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    lock.release()
    FolderLock.take(RunFolder(tmp_path)).release()
    os.close(writing)
    os.close(reading)
    os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"config.json": '{"model_type":"gpt2"}', "model.safetensors": "weights"},
            "config.json and a model.safetensors",
        ),
        ({"config.json": "[1]"}, "config.json"),
        ({"record.json": "not JSON"}, "record.json"),
    ],
)
def test_files_of_something_else_are_not_replaced(tmp_path: Path, files: dict[str, str], words: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        FolderLock.take(RunFolder(tmp_path))
    assert caught.value.message.startswith(
        f"{tmp_path} has a {words} that no run wrote, and a run there would replace "
    )
    assert caught.value.hint == "pass run_dir=a folder of its own"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)


def test_a_folder_of_an_earlier_run_can_be_used_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_json("config.json", {"schema_version": 1})
    (tmp_path / "model.safetensors").write_text("weights")
    FolderLock.take(folder).release()
