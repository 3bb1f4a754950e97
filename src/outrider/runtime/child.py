"""The life of a rank that our launcher started: read the payload, run the target, tell how it ended.

Decides when a rank must end because its starter is gone. Does not know what the target does, and imports no torch.
Entered by the few lines of BOOT that the launcher hands to a fresh interpreter, or from a nursery.
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
from pathlib import Path
from typing import Any

from outrider.machine.devices import parse_devices
from outrider.runtime.environment import launched
from outrider.runtime.messages import Link, Message, describe_error, encode
from outrider.runtime.payload import read_payload

# Carries the starter's sys.path over before anything of ours is imported: we may be importable only through it.
BOOT = """\
import json, sys
with open(sys.argv[1]) as file:
    start = json.load(file)
sys.path[:] = start["path"] + [entry for entry in sys.path if entry and entry not in start["path"]]
sys.argv[:] = start["argv"]
from outrider.runtime.child import main
main(start)
"""
_STARTER_CHECK_MS = 1_000
_PR_SET_PDEATHSIG = 1


def main(start: dict[str, Any]) -> None:
    """Run a rank from what the launcher wrote down for it, and end the process."""
    faulthandler.enable()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if start["dies_with_starter"]:
        die_with_parent()
    folder = Path(start["folder"])
    link = _make_link(start)
    watch = threading.Thread(
        target=_watch_starter,
        args=(start["control_fd"], link, folder),
        name="outrider-starter-watch",
        daemon=True,
    )
    watch.start()
    sys.exit(_run(link, folder / "payload"))


def die_with_parent() -> None:
    """On Linux the kernel ends this process with its parent, even where a deadlock lets no thread of it run."""
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
        deliver=PipeWriter(start["messages_fd"]),
        owns_process=True,
    )


def _run(link: Link, payload_path: Path) -> int:
    try:
        target, payload = read_payload(payload_path)
        link.send("started")
        target(link, **payload)
    # Also SystemExit and KeyboardInterrupt: a rank that ends early has failed, whatever it calls it.
    except BaseException as error:
        traceback.print_exc()
        link.send("error", **describe_error(error, rank=link.rank, spec=link.spec, step=link.step))
        return 1
    link.send("done")
    return 0


class PipeWriter:
    """Writes messages to the starter's pipe, whole ones, from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def __call__(self, message: Message) -> None:
        rest = memoryview(encode(message))
        with self._lock:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]


def _watch_starter(control_fd: int, link: Link, folder: Path) -> None:
    """Take in the starter's requests until it dies; then end this rank, whatever it is doing."""
    starter_pid = os.getppid()
    poller = select.poll()
    poller.register(control_fd, select.POLLIN)
    while True:
        if poller.poll(_STARTER_CHECK_MS):
            request = os.read(control_fd, 4096)
            if not request:
                break
            link.stop_requested.set()
        # A process forked by the starter may hold the pipe open beyond the starter's death.
        elif os.getppid() != starter_pid:
            break
    _vanish(folder)


def _vanish(folder: Path) -> None:
    """End this process and all it started, with nothing left of the payload."""
    shutil.rmtree(folder, ignore_errors=True)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
