"""Slices of a GPU: a private MPS daemon, or the daemon named by the environment, and the variables of each rank.

Decides which ranks need the daemon and its address. Never changes clocks, power, compute mode or MIG of a card.
Called by launch for the ranks it starts, and by sweeps that start several runs at a time.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from outrider.errors import DeviceError
from outrider.machine.devices import DeviceSpec
from outrider.slices import mps_process

CONTROL = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
LOGS = "CUDA_MPS_LOG_DIRECTORY"
SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
USUAL_PLACES = ("/usr/bin", "/usr/local/nvidia/bin")
"""Folders searched besides the PATH, where drivers and container hosts install it."""
# The process that owns the daemon has its own timeouts; these only apply if it hangs itself.
_START_S = mps_process.START_S + 2 * mps_process.ASK_S
_END_S = mps_process.ASK_S + 2 * mps_process.QUIT_S
# A daemon that is starting a server for another client may not answer.
_PATIENCE_S = 3.0
# A socket's path may have 107 characters: our folder's name takes 30 and the daemon adds some more.
_MAX_BASE_LENGTH = 50


@contextmanager
def slices(devices: Sequence[DeviceSpec]) -> Iterator[list[dict[str, str]]]:
    """Yield the variables of each rank while a daemon serves their slices; without slices nothing is started.

    Shares of one GPU may sum to more than 100: each is an upper bound, not a reservation.
    """
    with daemon_for(devices) as variables:
        yield [_variables(spec, variables) for spec in devices]


def _variables(spec: DeviceSpec, of_daemon: Mapping[str, str]) -> dict[str, str]:
    """All CUDA ranks of the run use the daemon, so that a whole GPU beside a slice of it is shared as well."""
    if spec.kind != "cuda" or not of_daemon:
        return {}
    return {**of_daemon, SHARE: str(100 if spec.share is None else spec.share)}


@contextmanager
def daemon_for(devices: Sequence[DeviceSpec]) -> Iterator[dict[str, str]]:
    """Yield the variables by which CUDA finds the daemon for these devices; empty without slices.

    It is the daemon named by the environment, which is not changed, or a private one. Several daemons of one GPU would
    take turns, so a program that starts several runs at a time opens one daemon for all of them.
    """
    if all(spec.share is None for spec in devices):
        yield {}
    elif os.environ.get(PIPES):
        yield _named_daemon()
    else:
        with private_daemon() as variables:
            yield variables


def _named_daemon() -> dict[str, str]:
    """Use the daemon named by the environment, after checking that it answers; nothing is started or ended."""
    variables = {name: os.environ[name] for name in (PIPES, LOGS) if name in os.environ}
    if not _answers(find_control()):
        raise DeviceError(
            f"{PIPES} is {variables[PIPES]}, but no MPS daemon answers there",
            hint=f"start one there with `{CONTROL} -d`, or unset {PIPES} for a private one",
        )
    return variables


def _answers(control: str) -> bool:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not mps_process.ask(control, "get_server_list"):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.1)
    return True


@contextmanager
def private_daemon() -> Iterator[dict[str, str]]:
    """Run a private daemon; yields the variables by which CUDA finds it."""
    control = find_control()
    folder = _make_folder()
    variables = {PIPES: str(folder / "pipe"), LOGS: str(folder / "log")}
    keeper = _start_keeper(control, folder, variables)
    try:
        _await_daemon(keeper)
        yield variables
    finally:
        _end_keeper(keeper, folder)


def find_control() -> str:
    control = shutil.which(CONTROL, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *USUAL_PLACES]))
    if control is None:
        raise DeviceError(
            f"slices of a GPU need {CONTROL}, which was not found",
            hint="it comes with NVIDIA's driver for Linux: put its folder on the PATH, or pass cuda:0",
        )
    return control


def _make_folder() -> Path:
    base = tempfile.gettempdir()
    is_short = len(base) <= _MAX_BASE_LENGTH
    # mkdtemp creates a private folder; every process that can reach the daemon's pipes could use it.
    folder = Path(tempfile.mkdtemp(prefix=f"outrider-{os.getpid()}-mps-", dir=base if is_short else "/tmp"))
    for name in ("pipe", "log"):
        (folder / name).mkdir(mode=0o700)
    return folder


def _start_keeper(control: str, folder: Path, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # In the daemon's environment a share would limit all clients, and visible devices would renumber the cards.
    inherited = {name: value for name, value in os.environ.items() if name not in (SHARE, "CUDA_VISIBLE_DEVICES")}
    try:
        return subprocess.Popen(
            [sys.executable, "-P", str(Path(mps_process.__file__)), control, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**inherited, **variables},
            # Ctrl-C in the terminal must not end the daemon before the ranks.
            start_new_session=True,
        )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _await_daemon(keeper: subprocess.Popen[bytes]) -> None:
    assert keeper.stdout is not None
    is_telling, _, _ = select.select([keeper.stdout], [], [], _START_S)
    line = keeper.stdout.readline() if is_telling else b""
    told = json.loads(line) if line else {"trouble": "was not started", "log": None}
    if told["trouble"] is not None:
        raise DeviceError(
            f"the MPS daemon for slices {told['trouble']}",
            hint="see `nvidia-smi` for the GPU's compute mode and who uses it, or pass whole devices such as cuda:0",
            traceback=told["log"] or None,
        )


def _end_keeper(keeper: subprocess.Popen[bytes], folder: Path) -> None:
    """Close the pipe, which makes the owner process end the daemon. Never raises, to keep the run's own error."""
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    keeper.stdin.close()
    try:
        keeper.wait(_END_S)
    except subprocess.TimeoutExpired:
        keeper.kill()
        keeper.wait()
        print(f"outrider: the MPS daemon in {folder} did not end within {_END_S:g} s", file=sys.stderr)
    keeper.stdout.close()
