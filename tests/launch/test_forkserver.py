"""Ranks that are forked from one process: when they are, what they find, and what becomes of them without it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from outrider.launch import forkserver, forkserver_process
from outrider.launch.launcher import Ranks, launch
from outrider.machine.devices import parse_devices
from outrider.world.messages import Link

TWO = parse_devices("cpu,cpu")
FOREVER_S = 600
Start = Callable[..., Ranks]


@pytest.fixture(autouse=True)
def own_forkserver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other tests keep theirs."""
    monkeypatch.setattr(forkserver, "_current", None)
    yield
    if forkserver._current is not None:
        forkserver._current.close()


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def start(target: Callable[..., None], *, imports: tuple[str, ...] = ("wave",), **options: Any) -> Ranks:
        return launch(target, {}, devices=TWO, log_dir=tmp_path, imports=imports, **options)

    return start


def told(ranks: Ranks) -> list[dict[str, Any]]:
    with ranks:
        messages = list(ranks.messages())
        ranks.raise_error()
    return [message.fields for message in sorted(messages, key=lambda message: message.rank)]


def tell_origin(link: Link) -> None:
    link.send("origin", parent=os.getppid(), has_module="wave" in sys.modules, folder=os.getcwd())


def tell_origin_and_hang(link: Link) -> None:
    tell_origin(link)
    time.sleep(FOREVER_S)


def tell_luck(link: Link) -> None:
    import numpy as np

    link.send("luck", number=float(np.random.rand()))


def tell_variable(link: Link) -> None:
    link.send("variable", value=os.environ.get("OUTRIDER_TEST"), parent=os.getppid())


def test_ranks_have_one_parent_that_has_imported_for_them(start: Start) -> None:
    first, second = told(start(tell_origin))
    assert first["has_module"] is second["has_module"] is True
    assert first["parent"] == second["parent"] != os.getpid()


def test_ranks_of_the_next_start_have_the_same_parent(start: Start) -> None:
    assert told(start(tell_origin))[0]["parent"] == told(start(tell_origin))[0]["parent"]


def test_without_imports_a_rank_is_a_fresh_process(start: Start) -> None:
    assert [(one["parent"], one["has_module"]) for one in told(start(tell_origin, imports=()))] == [
        (os.getpid(), False)
    ] * 2


@pytest.mark.parametrize(("value", "is_fresh"), [("1", True), ("0", False)])
def test_a_variable_asks_for_fresh_processes(
    start: Start, monkeypatch: pytest.MonkeyPatch, value: str, is_fresh: bool
) -> None:
    monkeypatch.setenv("OUTRIDER_FRESH_RANKS", value)
    assert (told(start(tell_origin))[0]["parent"] == os.getpid()) is is_fresh


def test_a_rank_begins_in_the_folder_where_the_starter_is_now(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(start(tell_origin))
    monkeypatch.chdir(tmp_path)
    assert told(start(tell_origin))[0]["folder"] == str(tmp_path)


def test_ranks_share_no_random_numbers(start: Start) -> None:
    first, second = told(start(tell_luck, imports=("numpy",)))
    assert first["number"] != second["number"]


def test_other_variables_take_another_forkserver_and_leave_the_ranks_of_the_first_alone(
    start: Start, monkeypatch: pytest.MonkeyPatch, wait_until_gone: Callable[[list[int]], None]
) -> None:
    with start(tell_origin_and_hang) as lasting:
        message = lasting.next_message()
        assert message is not None
        monkeypatch.setenv("OUTRIDER_TEST", "new")
        [variable, _] = told(start(tell_variable))
        assert variable["value"] == "new"
        assert variable["parent"] != message.fields["parent"]
        assert all(psutil.pid_exists(pid) for pid in lasting.pids)
    wait_until_gone([message.fields["parent"]])


def test_a_forkserver_that_cannot_import_is_not_tried_twice(start: Start) -> None:
    imports = ("a_module_that_nobody_wrote",)
    for _ in range(2):
        assert [one["parent"] for one in told(start(tell_origin, imports=imports))] == [os.getpid()] * 2
    assert forkserver.forkserver_for(imports=imports, environment=dict(os.environ)) is None


def test_ranks_die_with_their_forkserver_and_are_reported(start: Start) -> None:
    with start(tell_origin_and_hang) as ranks:
        message = ranks.next_message()
        assert message is not None
        os.kill(message.fields["parent"], signal.SIGKILL)
        list(ranks.messages())
        with pytest.raises(Exception, match=r"rank \d \(cpu\) died with signal 9 \(SIGKILL\)"):
            ranks.raise_error()
    # The next start makes another.
    assert told(start(tell_origin))[0]["parent"] != message.fields["parent"]


def test_a_forkserver_without_ranks_goes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver_process, "IDLE_S", 0.01)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert forkserver_process._serve(theirs) is None


def test_a_forkserver_goes_with_the_connection() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        assert forkserver_process._serve(theirs) is None


@pytest.mark.parametrize(("opened", "is_fit"), [("/dev/nvidiactl", False), ("/dev/null", True)])
def test_what_has_a_gpu_open_is_not_forked(monkeypatch: pytest.MonkeyPatch, opened: str, is_fit: bool) -> None:
    monkeypatch.setattr(forkserver_process, "_target", lambda link: opened)
    assert forkserver_process._is_fit() is is_fit


def test_nobody_but_the_starter_can_order_a_rank(start: Start) -> None:
    """It listens nowhere: its one socket is the end of a pair, which has no name that others could connect to."""
    with start(tell_origin_and_hang) as ranks:
        message = ranks.next_message(60)
        assert message is not None
        sockets = psutil.Process(message.fields["parent"]).net_connections("all")
    assert [one.laddr for one in sockets] == [""]
