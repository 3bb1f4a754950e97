"""A run folder made by hand, and a server in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_run import FakeRun

from outrider.watch.watch_server import WatchServer


@pytest.fixture
def fake_run(tmp_path: Path) -> FakeRun:
    run = FakeRun(tmp_path / "runs" / "first", seconds_ago=20.0)
    run.run_for(20.0)
    return run


@pytest.fixture
def serve() -> Iterator[Callable[[Path], WatchServer]]:
    """Serve a folder on a free port until the end of the test."""
    started: list[tuple[WatchServer, threading.Thread]] = []

    def start(folder: Path) -> WatchServer:
        server = WatchServer(folder, port=0)
        thread = threading.Thread(target=server.run, name="served")
        thread.start()
        started.append((server, thread))
        return server

    yield start
    for server, thread in started:
        server.stop()
        thread.join(20)
        assert not thread.is_alive()
