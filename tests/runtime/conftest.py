"""What tests of real processes share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import psutil
import pytest


@pytest.fixture
def wait_until_gone() -> Callable[[list[int]], None]:
    def wait(pids: list[int]) -> None:
        there = []
        for pid in pids:
            # Asking first whether it is there would leave it time to go in between.
            with contextlib.suppress(psutil.NoSuchProcess):
                there.append(psutil.Process(pid))
        _, alive = psutil.wait_procs(there, timeout=20)
        assert not alive

    return wait
