"""Fails every test that leaves processes, threads, variables, ports, shared memory or temporary folders behind.

Also what test files of all kinds share.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

# `repeatable` tries the same examples every time: CI tells what a change did, and luck finds its faults elsewhere.
# None has a deadline: a busy machine is no fault of a test.
settings.register_profile("usual", deadline=None)
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("thorough", max_examples=2_000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "usual"))

# Ranks share one output: unbuffered, the parts of a line are torn apart by those of others. torchrun sets `python -u`.
os.environ.pop("PYTHONUNBUFFERED", None)

# A shell starts what it puts in the background with interrupts ignored: tests of Ctrl-C would then wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What ends by itself may take a moment: a thread that is joined later, a process that is being reaped.
_PATIENCE_S = 3.0
# Started once by Python or torch on first use and meant to live as long as the process.
_LASTING_COMMANDS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "compile_worker")
_LASTING_THREADS = ("tqdm_monitor", "pytest_timeout", "outrider-forkserver")
_LASTING_VARIABLES = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
# The one from which ranks are forked, which then have its command; it goes when nobody needed it for a while.
_FORKSERVER = "outrider.launch.forkserver_process"
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What a test could leave behind, as readable names."""

    processes: frozenset[str]
    threads: frozenset[str]
    variables: frozenset[str]
    ports: frozenset[str]
    shared_memory: frozenset[str]
    folders: frozenset[str]


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = _look_around()
    yield
    leaks = _leaks(before, _look_around())
    deadline_s = time.monotonic() + _PATIENCE_S
    while leaks and time.monotonic() < deadline_s:
        time.sleep(0.05)
        leaks = _leaks(before, _look_around())
    if leaks:
        pytest.fail("left behind: " + "; ".join(leaks), pytrace=False)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As the ranks have: more threads add up in another order, and small tensors gain nothing from them."""
    # Not at the top: tests of what knows no torch do without it.
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def _look_around() -> Surroundings:
    this = psutil.Process()
    return Surroundings(
        processes=frozenset(_processes(this)),
        threads=frozenset(f"{thread.name} ({thread.ident})" for thread in threading.enumerate() if _is_passing(thread)),
        variables=frozenset(f"{name}={value}" for name, value in os.environ.items() if name not in _LASTING_VARIABLES),
        ports=frozenset(str(one.laddr.port) for one in this.net_connections("tcp") if one.status == "LISTEN"),
        shared_memory=frozenset(os.listdir(_SHARED_MEMORY)) if _SHARED_MEMORY.is_dir() else frozenset(),
        folders=frozenset(path.name for path in Path(tempfile.gettempdir()).glob("outrider-*")),
    )


def _leaks(before: Surroundings, after: Surroundings) -> list[str]:
    leaks = []
    for field in fields(Surroundings):
        name = field.name
        new = getattr(after, name) - getattr(before, name)
        # A variable that was taken away is a change too.
        gone = getattr(before, name) - getattr(after, name) if name == "variables" else frozenset()
        found = sorted(one for one in new | gone if not _belongs_to_others(name, one))
        if found:
            leaks.append(f"{name.replace('_', ' ')} {', '.join(found)}")
    return leaks


def _processes(this: psutil.Process) -> Iterator[str]:
    for child in this.children(recursive=True):
        try:
            command = " ".join(child.cmdline())
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            command = "ended, but nobody waited for it"
        is_forkserver = _FORKSERVER in command and child.ppid() == this.pid
        if not is_forkserver and not any(lasting in command for lasting in _LASTING_COMMANDS):
            yield f"{child.pid} ({command[:120]})"


def _is_passing(thread: threading.Thread) -> bool:
    return not thread.name.startswith(_LASTING_THREADS)


def _belongs_to_others(kind: str, name: str) -> bool:
    """Other programs, and other workers of this test run, use the same shared memory and the same folder."""
    if kind == "shared_memory":
        return _is_mapped_elsewhere(name)
    if kind == "folders":
        # Our launcher writes its process id into the name: outrider-<pid>-<random>.
        owner = name.split("-")[1]
        return owner.isdecimal() and int(owner) != os.getpid() and psutil.pid_exists(int(owner))
    return False


def _is_mapped_elsewhere(name: str) -> bool:
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if str(_SHARED_MEMORY / name) in Path(f"/proc/{process.pid}/maps").read_text():
                return True
        except OSError:
            continue
    return False
