"""The main function of a rank that our launcher started: read the payload, run the target, report how it ended.

Decides when a rank must end because its starter has died. Does not know the target, and does not import torch.
Called by BOOT, a few lines that the launcher passes to a fresh interpreter, or by the forkserver process.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import select
import shutil
import signal
import sys
import threading
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from outrider.errors import PeerLostError, WaitError
from outrider.launch.interruption import SignalGuard
from outrider.launch.payload import read_payload
from outrider.machine.devices import parse_devices
from outrider.world.environment import launched
from outrider.world.messages import Link, PipeWriter
from outrider.world.rank_errors import describe_error

# Copies the starter's sys.path before importing any of our modules, because outrider may only be found through it.
BOOT = """\
import json, sys
with open(sys.argv[1]) as file:
    start = json.load(file)
sys.path[:] = start["path"] + [entry for entry in sys.path if entry and entry not in start["path"]]
sys.argv[:] = start["argv"]
from outrider.launch.rank_main import main
main(start)
"""
_STARTER_CHECK_MS = 1_000
_PR_SET_PDEATHSIG = 1


def main(start: dict[str, Any]) -> None:
    """Run a rank with the settings that the launcher wrote, and exit."""
    faulthandler.enable()
    _set_up_signals()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if start["dies_with_starter"]:
        die_with_parent()
    folder = Path(start["folder"])
    link = _make_link(start)
    # The guard is never closed: signals are caught until the process ends.
    SignalGuard(partial(_interrupt, link)).open()
    watch = threading.Thread(
        target=_watch_starter,
        args=(start["control_fd"], link, folder),
        name="outrider-starter-watch",
        daemon=True,
    )
    watch.start()
    sys.exit(_run(link, folder / "payload", is_shown=start["is_shown"]))


def _set_up_signals() -> None:
    # The starter requests the stacks of a hung rank with SIGUSR1, and ends ranks with SIGHUP, even under nohup.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _interrupt(link: Link, number: signal.Signals) -> None:
    """Report a signal to the starter, which stops all ranks in an orderly way."""
    link.interrupt(number)
    link.send("interrupted", signal=number.value)


def die_with_parent() -> None:
    """On Linux, ask the kernel to kill this process with its parent, even if all threads are deadlocked."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _make_link(start: dict[str, Any]) -> Link:
    environment = launched()
    assert environment is not None, "the launcher sets the variables of a rank"
    for descriptor in (start["messages_fd"], start["control_fd"]):
        os.set_inheritable(descriptor, False)
    return Link(
        environment=environment,
        spec=parse_devices(start["device"])[0],
        num_threads=start["num_threads"],
        num_threads_alone=start["num_threads_alone"],
        deliver=PipeWriter(start["messages_fd"]),
        owns_process=True,
    )


def _run(link: Link, payload_path: Path, *, is_shown: bool) -> int:
    try:
        target, payload = read_payload(payload_path)
        link.send("started")
        target(link, **payload)
    # This includes SystemExit and KeyboardInterrupt: a rank that ends early has failed, unless a signal ended it.
    except BaseException as error:
        if link.interrupted_by is None or isinstance(error, Exception):
            return _fail(link, error, is_shown=is_shown)
    link.send("done")
    return 0 if link.interrupted_by is None else 128 + link.interrupted_by


def _fail(link: Link, error: BaseException, *, is_shown: bool) -> int:
    told = describe_error(error, rank=link.rank, spec=link.spec, step=link.step)
    # On a terminal the starter shows the cause first and summarises the consequences on other ranks.
    if not is_shown:
        traceback.print_exception(error)
    elif told["type"] not in (PeerLostError.__name__, WaitError.__name__):
        print(_shown(told["traceback"] or ""), file=sys.stderr, flush=True)
    link.send("error", **told)
    return 1


def _shown(frames: str) -> str:
    """The user's part of a traceback; adds the heading, which tracebacks of our own errors lack."""
    is_headed = frames.startswith("Traceback") or not frames
    return (frames if is_headed else f"Traceback (most recent call last):\n{frames}").rstrip()


def _watch_starter(control_fd: int, link: Link, folder: Path) -> None:
    """Handle the starter's requests until it dies; then end this rank at once."""
    try:
        _obey_starter(control_fd, link)
    except Exception:
        # Without this connection the rank could outlive its starter.
        traceback.print_exc()
    _vanish(folder)


def _obey_starter(control_fd: int, link: Link) -> None:
    starter_pid = os.getppid()
    poller = select.poll()
    poller.register(control_fd, select.POLLIN)
    while True:
        if poller.poll(_STARTER_CHECK_MS):
            requests = os.read(control_fd, 4096)
            if not requests:
                break
            for request in requests.decode().splitlines():
                _obey(request, link)
        # A fork of the starter may keep the pipe open after the starter's death.
        elif os.getppid() != starter_pid:
            break


def _obey(request: str, link: Link) -> None:
    name, *arguments = request.split()
    if name == "interrupt":
        link.interrupt(signal.Signals(int(arguments[0])))
    else:
        link.stop_requested.set()


def _vanish(folder: Path) -> None:
    """Remove the payload, and end this process and its children."""
    shutil.rmtree(folder, ignore_errors=True)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
