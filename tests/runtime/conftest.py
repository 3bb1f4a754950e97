"""What tests of real processes share."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import pytest


@pytest.fixture
def wait_until_gone() -> Callable[[list[int]], None]:
    def wait(pids: list[int]) -> None:
        _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=20)
        assert not alive

    return wait
