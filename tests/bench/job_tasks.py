"""What cases of the tests do in their worker before they train, or instead of it. Not a test itself.

A module of its own, so that the workers can import it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from outrider.bench.tasks import Task
from outrider.errors import ConfigError, StepError

PATIENCE_S = 120.0


def meet(mine: Path, other: Path, make_task: Callable[[], Task]) -> Task:
    """Goes on only where the other is there at the same time."""
    mine.touch()
    deadline_s = time.monotonic() + PATIENCE_S
    while not other.exists():
        if time.monotonic() > deadline_s:
            raise ConfigError(f"nobody made {other.name}")
        time.sleep(0.02)
    return make_task()


def fail() -> NoReturn:
    raise StepError("rank 1 (cpu@0.5), step 7: ValueError: no", hint="say yes", rank=1, step=7, traceback="line 3")


def be_killed() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nothing runs after this")


def tell_variables(path: Path, *names: str) -> NoReturn:
    path.write_text("\n".join(f"{name}={os.environ.get(name)}" for name in names))
    raise ConfigError("there is no GPU here")


def refuse_by_pid() -> NoReturn:
    raise ConfigError(f"worker {os.getpid()} will not")
