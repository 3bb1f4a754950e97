"""The private MPS daemon of a run: a stand-in for NVIDIA's control program, real processes, and every way they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from outrider.errors import ConfigError, DeviceError
from outrider.launch.launcher import launch
from outrider.machine.devices import parse_devices
from outrider.slices import mps, slice_check
from outrider.world.messages import Link

SLICES = parse_devices("cuda:0%70,cuda:0%12")
FAKE = Path(__file__).with_name("fake_mps_control.py")
FOREVER_S = 600


def tell_variables(link: Link) -> None:
    names = (mps.PIPES, mps.LOGS, mps.SHARE)
    link.send("variables", variables={name: os.environ.get(name) for name in names})


def fail_in_rank_1(link: Link) -> None:
    if link.rank == 1:
        raise ValueError("loss went wrong")
    time.sleep(FOREVER_S)


def die_in_rank_1(link: Link) -> None:
    if link.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(FOREVER_S)


class Daemon:
    """What the stand-in wrote down."""

    def __init__(self, journal: Path) -> None:
        self._journal = journal

    @property
    def lines(self) -> list[str]:
        return self._journal.read_text().splitlines() if self._journal.exists() else []

    @property
    def pid(self) -> int:
        return int(self.lines[0].split()[1])

    def await_end(self) -> None:
        """Was asked to quit, and is gone."""
        psutil.wait_procs([psutil.Process(self.pid)] if psutil.pid_exists(self.pid) else [], timeout=20)
        assert not psutil.pid_exists(self.pid)
        assert self.lines[1:] == ["quit"]


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    """Puts the stand-in on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / mps.CONTROL
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {FAKE} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_MPS_JOURNAL", str(tmp_path / "journal"))
    return Daemon(tmp_path / "journal")


# What ranks find.


def test_every_cuda_rank_gets_its_share_and_the_same_daemon(daemon: Daemon, tmp_path: Path) -> None:
    devices = parse_devices("cuda:0%70,cuda:0%12,cuda:1,cpu")
    with launch(tell_variables, {}, devices=devices, log_dir=tmp_path) as ranks:
        messages = sorted(ranks.messages(), key=lambda message: message.rank)
        ranks.raise_error()
    first, *others, on_cpu = [message.fields["variables"] for message in messages]
    assert [first[mps.SHARE], *(other[mps.SHARE] for other in others)] == ["70", "12", "100"]
    assert [other[mps.PIPES] for other in others] == [first[mps.PIPES]] * 2
    assert set(on_cpu.values()) == {None}


def test_shares_of_one_gpu_may_sum_to_more_than_all_of_it(daemon: Daemon) -> None:
    with mps.slices(parse_devices("cuda:0%80,cuda:0%80")) as variables:
        assert [own[mps.SHARE] for own in variables] == ["80", "80"]


def test_one_slice_alone_gets_a_daemon(daemon: Daemon) -> None:
    with mps.slices(parse_devices("cuda:0%12")) as (variables,):
        assert variables[mps.SHARE] == "12"
    daemon.await_end()


def test_a_script_on_one_slice_gets_a_process_that_has_the_share(daemon: Daemon, tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(
        "import os\nimport outrider\nfrom outrider.api import joining\n"
        "joining.cuda_devices = lambda: ('cuda:0',)\n"
        f"print('share', os.environ.get('{mps.SHARE}'), flush=True)\n"
        "with outrider.Session(devices='cuda:0%12', run_dir='run'):\n    pass\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines() == ["share None", "share 12"]
    # There is no GPU; the slice itself is as it should be.
    assert "rank 0 is to use cuda:0%12, torch" in done.stderr
    daemon.await_end()


def test_without_slices_nothing_is_started(daemon: Daemon) -> None:
    with mps.slices(parse_devices("cuda:0,cpu")) as variables:
        assert variables == [{}, {}]
    assert daemon.lines == []


def test_the_daemon_sees_all_cards_and_no_share_of_its_own(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv(mps.SHARE, "50")
    with mps.private_daemon():
        assert daemon.lines[0].endswith(" []")


def test_its_folder_is_private_and_short_and_goes_with_it(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 20)))
    with mps.private_daemon() as variables:
        folder = Path(variables[mps.PIPES]).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        assert [path.stat().st_mode & 0o777 for path in folder.iterdir() if path.is_dir()] == [0o700, 0o700]
        assert len(variables[mps.PIPES]) < 80
    assert not folder.exists()


# A daemon that is there already.


@pytest.fixture
def named(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A daemon that somebody started and the environment names, as its pipes."""
    with mps.private_daemon() as variables, monkeypatch.context() as environment:
        environment.setenv(mps.PIPES, variables[mps.PIPES])
        yield variables[mps.PIPES]


def test_ranks_use_the_daemon_that_the_environment_names(daemon: Daemon, named: str, tmp_path: Path) -> None:
    with launch(tell_variables, {}, devices=SLICES, log_dir=tmp_path) as ranks:
        messages = sorted(ranks.messages(), key=lambda message: message.rank)
        ranks.raise_error()
    told = [message.fields["variables"] for message in messages]
    assert [(own[mps.PIPES], own[mps.SHARE]) for own in told] == [(named, "70"), (named, "12")]


def test_a_daemon_that_was_there_before_is_neither_started_again_nor_ended(daemon: Daemon, named: str) -> None:
    with mps.slices(SLICES):
        pass
    assert daemon.lines == [f"up {daemon.pid} []"]
    assert psutil.pid_exists(daemon.pid)


def test_a_named_daemon_that_is_busy_is_asked_again(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False, False, True])
    monkeypatch.setattr(mps.mps_process, "ask", lambda control, command: next(answers))
    with mps.slices(SLICES) as variables:
        assert [own[mps.PIPES] for own in variables] == [named, named]
    assert list(answers) == []


def test_a_named_daemon_that_nobody_answers_for_is_an_error(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(mps.PIPES, str(tmp_path))
    monkeypatch.setattr(mps, "_PATIENCE_S", 0.0)
    with pytest.raises(DeviceError) as caught:
        launch(tell_variables, {}, devices=SLICES, log_dir=tmp_path)
    assert caught.value.message == f"CUDA_MPS_PIPE_DIRECTORY is {tmp_path}, but no MPS daemon answers there"
    assert caught.value.hint == (
        "start one there with `nvidia-cuda-mps-control -d`, or unset CUDA_MPS_PIPE_DIRECTORY for a private one"
    )
    assert daemon.lines == []


def test_without_slices_a_named_daemon_is_not_asked(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(mps.PIPES, str(tmp_path))
    with mps.slices(parse_devices("cuda:0,cpu")) as variables:
        assert variables == [{}, {}]


# How it ends.


def test_it_ends_with_the_ranks(daemon: Daemon, tmp_path: Path) -> None:
    with launch(tell_variables, {}, devices=SLICES, log_dir=tmp_path) as ranks:
        list(ranks.messages())
    daemon.await_end()


@pytest.mark.parametrize("target", [fail_in_rank_1, die_in_rank_1])
def test_it_ends_where_a_rank_fails(daemon: Daemon, tmp_path: Path, target: Callable[..., None]) -> None:
    with launch(target, {}, devices=SLICES, log_dir=tmp_path) as ranks:
        list(ranks.messages())
        with pytest.raises(Exception, match=r"rank 1 \(cuda:0%12\)"):
            ranks.raise_error()
    daemon.await_end()


def test_it_ends_where_a_rank_cannot_be_started(daemon: Daemon, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rank 1 cannot be started with /nowhere/python"):
        launch(tell_variables, {}, devices=SLICES, log_dir=tmp_path, interpreters=[sys.executable, "/nowhere/python"])
    daemon.await_end()


SCRIPT = """
import sys, time
from pathlib import Path
from outrider.machine.devices import parse_devices
from outrider.launch.launcher import launch

def work(link):
    link.send("ready")
    time.sleep(600)

ranks = launch(work, {}, devices=parse_devices("cuda:0%70,cuda:0%12"), log_dir=Path(sys.argv[1]))
print(ranks.next_message().kind, ranks.next_message().kind, flush=True)
ranks.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "a killed starter"])
def test_it_ends_with_its_starter(daemon: Daemon, tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"ready ready\n"
        starter.send_signal(number)
        starter.wait(60)
    daemon.await_end()
    await_no_folder_of(starter.pid)


def await_no_folder_of(pid: int) -> None:
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s and list(Path(tempfile.gettempdir()).glob(f"outrider-{pid}-mps-*")):
        time.sleep(0.05)
    assert list(Path(tempfile.gettempdir()).glob(f"outrider-{pid}-mps-*")) == []


def keep(tmp_path: Path, *, limits: str) -> subprocess.CompletedProcess[str]:
    """Run the keeper with other limits than its own, for a starter that closes the pipe at once."""
    folder = tmp_path / "mps"
    for name in ("pipe", "log"):
        (folder / name).mkdir(parents=True)
    code = f"import sys; from pathlib import Path; from outrider.slices import mps_process; {limits}; "
    code += "mps_process.main(sys.argv[1], Path(sys.argv[2]))"
    variables = {mps.PIPES: str(folder / "pipe"), mps.LOGS: str(folder / "log")}
    return subprocess.run(
        [sys.executable, "-c", code, mps.find_control(), str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=os.environ | variables,
        text=True,
        timeout=60,
    )


def test_one_that_does_not_go_is_killed(daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MPS", "deaf")
    kept = keep(tmp_path, limits="mps_process.QUIT_S = 0.2")
    assert json.loads(kept.stdout) == {"trouble": None, "log": None}
    daemon.await_end()


# Starts that cannot work.


def test_one_that_never_answers_is_given_up(daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MPS", "silent")
    kept = keep(tmp_path, limits="mps_process.START_S = 0.5")
    assert json.loads(kept.stdout)["trouble"] == "did not answer within 0.5 s"


def test_one_that_refuses_to_start_is_an_error_with_its_log(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAKE_MPS", "refuses")
    with pytest.raises(DeviceError) as caught:
        launch(tell_variables, {}, devices=SLICES, log_dir=tmp_path)
    assert caught.value.message == "the MPS daemon for slices ended with exit code 1"
    assert caught.value.traceback == "Cannot start\nStarting control daemon\nFailed to open the device"
    assert caught.value.hint == (
        "see `nvidia-smi` for the GPU's compute mode and who uses it, or pass whole devices such as cuda:0"
    )


def test_slices_need_the_control_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(mps, "USUAL_PLACES", ())
    with pytest.raises(DeviceError) as caught:
        launch(tell_variables, {}, devices=SLICES, log_dir=tmp_path)
    assert caught.value.message == "slices of a GPU need nvidia-cuda-mps-control, which was not found"
    assert caught.value.hint == ("it comes with NVIDIA's driver for Linux: put its folder on the PATH, or pass cuda:0")


# What a rank sees of it.


@pytest.mark.parametrize(("variables", "found"), [({}, "not set"), ({mps.SHARE: "50"}, "50")])
def test_a_rank_that_others_started_without_its_share_is_told_what_to_do(variables: dict[str, str], found: str) -> None:
    with pytest.raises(DeviceError) as caught:
        slice_check.check_share(SLICES[1], rank=1, variables=variables)
    assert caught.value.message == (
        f"rank 1 is to use cuda:0%12, but CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is {found} in its process"
    )
    assert caught.value.hint == (
        "call train() in a plain program, which starts the ranks with it; under torchrun or srun, "
        "start `nvidia-cuda-mps-control -d` first and set CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=12 for rank 1"
    )


def test_a_rank_with_its_share_set_is_fine_whoever_set_it() -> None:
    slice_check.check_share(SLICES[1], rank=1, variables={mps.SHARE: "12"})


def test_a_rank_without_a_daemon_would_have_the_whole_gpu_and_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_check, "_attribute", lambda number, ordinal: 0)
    with pytest.raises(DeviceError) as caught:
        slice_check.check_served(SLICES[1], rank=1)
    assert caught.value.message == "rank 1 is to use cuda:0%12, but no MPS daemon serves its process"


def test_a_gpu_that_somebody_holds_is_an_error_that_names_its_compute_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_check, "_attribute", lambda number, ordinal: 3)
    error = slice_check.unusable(SLICES[0], RuntimeError("CUDA error: device is busy\nmore"), rank=0)
    assert error.message == (
        "rank 0 cannot use cuda:0%70: CUDA error: device is busy (its compute mode is EXCLUSIVE_PROCESS)"
    )
    assert error.hint == "end the programs that use the GPU, or have its administrator set compute mode DEFAULT"
