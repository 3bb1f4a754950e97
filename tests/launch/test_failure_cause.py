"""Which failure of several is told: the cause before its consequences, the rank that hangs before one that waits."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import OutriderError, PeerLostError, StepError, WaitError
from outrider.launch import ranks as ranks_module
from outrider.launch.launcher import Ranks, launch
from outrider.launch.ranks import Blame
from outrider.machine.devices import parse_devices
from outrider.world.messages import Link

FOREVER_S = 600


@pytest.fixture(autouse=True)
def short_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "SILENCE_MARGIN_S", 0.5)


def failure(target: Callable[..., None], log_dir: Path, **options: Any) -> OutriderError:
    devices = parse_devices(options.pop("devices", "cpu,cpu@0.4"))
    with launch(target, {}, devices=devices, log_dir=log_dir, **options) as ranks:
        list(ranks.messages())
        with pytest.raises(OutriderError) as caught:
            ranks.raise_error()
    return caught.value


# Targets


def tell_nonsense(link: Link) -> None:
    os.write(link._deliver._descriptor, b"no message at all\n")  # type: ignore[attr-defined]
    time.sleep(FOREVER_S)


def end_well(link: Link) -> None:
    link.send("epoch", number=1)


def train_and_hang(link: Link) -> None:
    link.send("progress", samples=1)
    time.sleep(FOREVER_S)


def train_and_stop(link: Link) -> None:
    link.send("progress", samples=1)
    os.kill(os.getpid(), signal.SIGSTOP)


def evaluate_for_long(link: Link) -> None:
    link.send("progress", samples=1)
    with link.unwatched():
        time.sleep(2.0)
    link.send("epoch", number=1)


def hang_before_the_first_step(link: Link) -> None:
    time.sleep(2.0)
    link.send("epoch", number=1)


def wait_for_rank_1(link: Link) -> None:
    if link.rank == 0:
        raise WaitError("rank 0 waited 300 s for parameters of rank 1", rank=0)
    time.sleep(FOREVER_S)


def wait_for_stopped_rank_1(link: Link) -> None:
    if link.rank == 0:
        raise WaitError("rank 0 waited 300 s for parameters of rank 1", rank=0)
    os.kill(os.getpid(), signal.SIGSTOP)


def wait_for_rank_1_that_fails(link: Link) -> None:
    if link.rank == 0:
        raise WaitError("rank 0 waited 300 s for parameters of rank 1", rank=0)
    time.sleep(0.5)
    raise ValueError("a bad batch")


# The starter's own thread


def test_an_exception_in_the_watching_thread_is_the_error_of_the_run(tmp_path: Path) -> None:
    error = failure(tell_nonsense, tmp_path)
    assert error.message == "watching the ranks failed: JSONDecodeError: Expecting value: line 1 column 1 (char 0)"
    assert error.hint == "this is a defect of Outrider; please report it with the traceback"
    assert error.traceback is not None
    assert "json.loads(line)" in error.traceback


def test_an_exception_while_cleaning_up_is_the_error_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Ranks] = []

    def fail() -> None:
        raise RuntimeError("the daemon does not end")

    with launch(end_well, {}, devices=parse_devices("cpu"), log_dir=tmp_path) as ranks:
        started.append(ranks)
        on_end = ranks._on_end
        monkeypatch.setattr(ranks, "_on_end", fail)
        list(ranks.messages())
        on_end()
        with pytest.raises(OutriderError, match=r"^cleaning up after the ranks failed: RuntimeError: the daemon does"):
            ranks.raise_error()


def test_a_rank_that_cannot_hear_its_starter_any_more_ends_and_says_why(tmp_path: Path) -> None:
    with launch(train_and_hang, {}, devices=parse_devices("cpu"), log_dir=tmp_path) as ranks:
        assert ranks.next_message(60)
        ranks._processes[0]._tell("interrupt nonsense")
        with pytest.raises(OutriderError, match=r"^rank 0 \(cpu\) died with signal 9 \(SIGKILL\)"):
            _ = list(ranks.messages()), ranks.raise_error()
    assert "ValueError: invalid literal for int()" in (tmp_path / "rank0.log").read_text()


# Ranks that hang


def test_a_rank_alone_that_hangs_is_named_with_its_stacks_in_the_log(tmp_path: Path) -> None:
    error = failure(train_and_hang, tmp_path, devices="cpu", timeout_s=0.5)
    assert isinstance(error, WaitError)
    assert (error.message, error.rank) == ("rank 0 (cpu) made no progress for 1 s", 0)
    assert error.hint == (f"the stacks of its threads are in {tmp_path}/rank0.log; raise timeout_s if it was only slow")
    assert "in train_and_hang" in (tmp_path / "rank0.log").read_text()


def test_a_rank_alone_that_is_stopped_is_told_as_stopped(tmp_path: Path) -> None:
    error = failure(train_and_stop, tmp_path, devices="cpu", timeout_s=0.5)
    assert error.message == "rank 0 (cpu) is stopped (as by SIGSTOP or Ctrl-Z) and made no progress for 1 s"
    assert error.hint == "see what stopped it: a debugger, a batch system or `kill -STOP`"


@pytest.mark.parametrize("target", [evaluate_for_long, hang_before_the_first_step])
def test_work_that_may_take_long_is_not_taken_for_a_hang(target: Callable[..., None], tmp_path: Path) -> None:
    with launch(target, {}, devices=parse_devices("cpu"), log_dir=tmp_path, timeout_s=0.2) as ranks:
        kinds = [message.kind for message in ranks.messages()]
        ranks.raise_error()
    assert kinds[-1] == "epoch"


def test_the_rank_that_hangs_is_named_and_not_the_one_that_waits(tmp_path: Path) -> None:
    error = failure(wait_for_rank_1, tmp_path)
    assert isinstance(error, WaitError)
    assert error.message == "rank 1 (cpu@0.4) does not answer: rank 0 waited 300 s for parameters of rank 1"
    assert error.rank == 1
    assert "in wait_for_rank_1" in (tmp_path / "rank1.log").read_text()


def test_the_rank_that_is_stopped_is_named_and_not_the_one_that_waits(tmp_path: Path) -> None:
    error = failure(wait_for_stopped_rank_1, tmp_path)
    assert error.message == (
        "rank 1 (cpu@0.4) is stopped (as by SIGSTOP or Ctrl-Z) and does not answer: "
        "rank 0 waited 300 s for parameters of rank 1"
    )
    assert error.rank == 1


def test_what_a_rank_fails_of_comes_before_those_that_waited_for_it(tmp_path: Path) -> None:
    error = failure(wait_for_rank_1_that_fails, tmp_path)
    assert isinstance(error, StepError)
    assert error.message == "rank 1 (cpu@0.4): ValueError: a bad batch"


# Consequences


def test_the_lost_connections_of_other_ranks_are_one_line() -> None:
    found = Blame(timeout_s=None)
    for rank in (2, 0):
        found.note(PeerLostError(f"rank {rank} lost rank 1", rank=rank))
    found.note(StepError("rank 1 (cpu), step 3: ValueError: a bad batch", rank=1))
    cause = found.cause()
    assert cause.message == "rank 1 (cpu), step 3: ValueError: a bad batch"
    assert cause.__notes__ == ["outrider: ranks 0 and 2 lost their connection to rank 1 as a consequence"]
    assert found.cause().__notes__ == cause.__notes__


def test_one_lost_connection_is_told_in_the_singular() -> None:
    found = Blame(timeout_s=None)
    found.note(PeerLostError("rank 0 lost rank 1", rank=0))
    found.note(OutriderError("rank 1 (cpu) died with signal 9 (SIGKILL)", rank=1))
    assert found.cause().__notes__ == ["outrider: rank 0 lost its connection to rank 1 as a consequence"]


def test_a_lost_connection_without_a_cause_is_the_error() -> None:
    found = Blame(timeout_s=None)
    lost = PeerLostError("rank 0 lost the store", rank=0)
    found.note(lost)
    assert found.cause() is lost
    assert not hasattr(lost, "__notes__")


def test_a_mistake_that_several_ranks_find_is_told_by_rank_0() -> None:
    """The program of rank 0 shows its own traceback; that of another rank would follow it without a heading."""
    found = Blame(timeout_s=None)
    for rank in (1, 0):
        found.note(OutriderError("rank 0 waits for evaluate_together(), rank 1 for the end of epoch 0", rank=rank))
    assert found.cause().rank == 0
