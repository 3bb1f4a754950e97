"""What a run says to its user: the line at the start, the progress bar, the line at the end, and when it is quiet."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import outrider
from outrider.api import progress_bar
from outrider.api.options import make_order
from outrider.api.progress_bar import ProgressBar, bar_text
from outrider.api.run_lines import end_line, own_speeds, start_line, wrap_line
from outrider.api.run_talk import RunTalk
from outrider.average.outer import Outer
from outrider.average.transport.backend_table import choose_backend
from outrider.integrations.accelerate_arguments import join_session
from outrider.machine.devices import parse_devices
from outrider.replica.averaging_compensation import Compensation
from outrider.replica.learning_words import learning_words
from outrider.world.messages import Message


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal on stderr; not a fixture, because pytest sets stderr again when the test begins."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    return stream


def record(*, devices: list[str]) -> dict[str, Any]:
    """Two seconds of training; rank 0 computed for 1.6 s, rank 1 for 1.8 s."""
    share = {1: (1.0,), 2: (0.64, 0.36)}[len(devices)]
    return {
        "devices": devices,
        "epochs": [{"samples": 1_000, "share_by_rank": share, "seconds": 2.0}],
        "totals": {"samples_per_s": 500.0, "train_s": 2.0, "wait_fraction": 0.1, "exposed_average_fraction": 0.05},
        "idle": {"waits_s": [{"average": 0.3, "data": 0.01}, {"average": 0.1}][: len(devices)]},
    }


# The line at the start


def test_the_first_line_has_devices_policy_and_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "mine"
    line = start_line(["cpu", "cpu@0.5"], policy="sync as given", learning=None, folder=folder)
    assert line == "cpu, cpu@0.5; sync as given; runs/mine"


def test_the_first_line_of_wrap_has_devices_and_backend() -> None:
    backend = choose_backend("auto", parse_devices("cpu,cpu@0.5"))
    assert wrap_line(["cpu", "cpu@0.5"], backend=backend) == (
        "cpu, cpu@0.5; averages by hand; backend cpu (auto: rank 0 is on cpu, and nccl joins CUDA devices only)"
    )


@pytest.mark.parametrize(("quiet", "told"), [(False, "outrider: cpu\n"), ("auto", ""), (True, "")])
def test_wrap_prints_one_line_unless_it_is_quiet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], one_thread: None, quiet: Any, told: str
) -> None:
    outrider.wrap(torch.nn.Linear(4, 1), devices="cpu", run_dir=tmp_path, quiet=quiet).close()
    assert capsys.readouterr().err == told


def test_wrap_inside_a_session_prints_no_line_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    with outrider.Session(devices="cpu", run_dir=tmp_path, quiet=False):
        outrider.wrap(torch.nn.Linear(4, 1))
    assert capsys.readouterr().err == ""


@pytest.fixture
def policies_told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What first lines say about the policy; that of one device is not printed."""
    told = []
    monkeypatch.setattr(RunTalk, "introduce", lambda self, devices, *, policy, folder: told.append(policy))
    return told


@pytest.mark.parametrize(
    ("options", "words"), [({}, "auto by default"), ({"policy": "auto"}, "auto as given")], ids=str
)
def test_a_session_calls_its_policy_a_default_only_where_none_was_passed(
    tmp_path: Path, policies_told: list[str], one_thread: None, options: dict[str, Any], words: str
) -> None:
    train_loop(tmp_path, **options)
    assert policies_told == [words]


@pytest.mark.parametrize(
    ("options", "words"), [({}, "auto by default"), ({"policy": "auto"}, "auto as given")], ids=str
)
def test_train_calls_its_policy_a_default_only_where_none_was_passed(
    problem: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    assert make_order(problem, {"batch_size": 8, **options}).policy_words == words


@pytest.mark.parametrize(
    ("options", "words"), [({}, "balanced by default"), ({"policy": "balanced"}, "balanced as given")], ids=str
)
def test_a_framework_calls_its_own_default_policy_a_default(
    tmp_path: Path, policies_told: list[str], one_thread: None, options: dict[str, Any], words: str
) -> None:
    session, _ = join_session({"devices": "cpu", "run_dir": tmp_path, **options})
    session.close()
    assert policies_told == [words]


def test_the_first_line_of_one_device_has_no_policy() -> None:
    line = start_line(["cpu"], policy="async as given", learning="learning rate x 2", folder=Path("/runs/mine"))
    assert line == "cpu; /runs/mine"


def test_the_first_line_counts_many_devices() -> None:
    devices = [f"cuda:{number}" for number in range(8)]
    line = start_line(devices, policy="sync as given", learning=None, folder=Path("/runs/mine"))
    assert line == "cuda:0, cuda:1, cuda:2 and 5 more; sync as given; /runs/mine"


@pytest.mark.parametrize(
    ("outer", "follows_ranks", "lr_scale", "told"),
    [
        (Outer(), False, 1.0, None),
        (Outer(), False, 1.5, "learning rate x 1.5 (lr_scale=1.0: off)"),
        (Outer(), False, "auto", 'learning rate unchanged by lr_scale="auto"'),
        (Outer(), True, "auto", "learning rate scaled by the effective number of ranks (lr_scale=1.0: off)"),
        (Outer(kind="nesterov"), False, 1.0, 'outer Nesterov step (outer="none": off)'),
    ],
)
def test_what_is_changed_about_learning_is_told_with_the_way_to_switch_it_off(
    outer: Outer, follows_ranks: bool, lr_scale: Any, told: str | None
) -> None:
    compensation = Compensation(outer=outer, follows_ranks=follows_ranks, reason="")
    assert learning_words(compensation, lr_scale=lr_scale) == told


# The line at the end


def test_the_speed_of_each_device_is_that_while_it_computed() -> None:
    assert own_speeds(record(devices=["cpu", "cpu@0.5"])) == [pytest.approx(400.0), pytest.approx(200.0)]


def test_the_last_line_has_the_gain_the_wait_and_the_timeline(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(json.dumps(record(devices=["cpu", "cpu@0.5"])))
    (tmp_path / "timeline.html").touch()
    assert end_line(tmp_path) == f"1.25x cpu's speed, waited 10%; {tmp_path}/timeline.html"


@pytest.mark.parametrize(
    ("devices", "told"),
    [(["cpu", "cpu@0.1"], "cpu@0.1 rested 90%"), (["cpu", "cpu@0.1", "cpu@0.2"], "2 devices rested 90%")],
)
def test_a_device_that_rested_did_not_wait(tmp_path: Path, devices: list[str], told: str) -> None:
    made = record(devices=devices[:2]) | {"devices": devices}
    train_s = made["totals"]["train_s"]
    others = len(devices) - 1
    made["idle"] = {"waits_s": [{"average": 0.0}, *[{"average": 0.0, "rest": 0.9 * train_s}] * others]}
    made["totals"]["wait_fraction"] = 0.9 * others / len(devices)
    made["epochs"] = [{"samples": 1_000, "share_by_rank": [1.0, *[0.0] * others]}]
    (tmp_path / "record.json").write_text(json.dumps(made))
    line = end_line(tmp_path)
    assert line is not None
    assert f"x cpu's speed, waited 0%, {told}; " in line


def test_the_last_line_of_one_device_has_its_speed(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(json.dumps(record(devices=["cpu"])))
    assert end_line(tmp_path) == f"500 samples/s; {tmp_path}/timeline.json"


def test_a_run_without_an_epoch_has_no_last_line(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(json.dumps({**record(devices=["cpu"]), "epochs": []}))
    assert end_line(tmp_path) is None


# When it is said


@pytest.mark.parametrize(
    ("quiet", "is_terminal", "is_on"),
    [("auto", True, True), ("auto", False, False), (True, True, False), (False, False, True)],
)
def test_a_run_talks_in_a_terminal_unless_it_is_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, quiet: Any, is_terminal: bool, is_on: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal() if is_terminal else io.StringIO())
    talk = RunTalk.open(quiet)
    assert talk.is_on == is_on
    assert (talk.bar is not None) == (is_on and is_terminal)


def test_a_run_talks_in_a_notebook_without_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    talk = RunTalk.open("auto")
    assert (talk.is_on, talk.bar) == (True, None)


def test_only_the_main_rank_talks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_terminal(monkeypatch)
    assert not RunTalk.open(False, is_main=False).is_on


def test_a_long_line_breaks_between_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "60")
    RunTalk(is_on=True).chose("exact", "rank 0 alone is faster than sharing; local steps would learn 0.95x as much")
    assert terminal.getvalue() == (
        "outrider: exact steps: rank 0 alone is faster than sharing;\n  local steps would learn 0.95x as much\n"
    )


def test_a_session_that_is_told_to_talk_prints_two_lines_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    train_loop(tmp_path, quiet=False)
    told = capsys.readouterr()
    first, last = told.err.splitlines()
    assert told.out == ""
    assert first == f"outrider: cpu; {tmp_path}"
    assert last.startswith("outrider: ")
    assert " samples/s; " in last


def test_a_session_outside_of_a_terminal_is_quiet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    train_loop(tmp_path)
    assert capsys.readouterr().err == ""


def test_a_session_in_a_terminal_shows_a_bar_that_disappears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    terminal = use_terminal(monkeypatch)
    monkeypatch.setattr(progress_bar, "DRAW_EVERY_S", 0.0)
    train_loop(tmp_path)
    shown = terminal.getvalue()
    assert "epoch 2/2  [" in shown
    assert "loss " in shown
    assert sys.stderr is terminal
    assert shown.splitlines()[-1].removeprefix("\x1b[K").startswith("outrider: ")


def train_loop(folder: Path, **options: Any) -> None:
    inputs = torch.randn(64, 4)
    model = torch.nn.Linear(4, 1)
    with outrider.Session(devices="cpu", run_dir=folder, **options) as s:
        s.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
        for _ in s.epochs(2):
            for batch in s.batches(inputs, batch_size=8):
                s.step(model(batch).square().mean())


# The bar


def test_the_bar_has_total_loss_and_remaining_time() -> None:
    assert bar_text("epoch 2/8", 0.25, loss=0.5, eta_s=75) == (
        "epoch 2/8  [######..................]   25%  loss 0.500  ETA 1 min 15 s"
    )
    assert bar_text("pass 1", 1.0, loss=None, eta_s=7_500).endswith("100%  ETA 2 h 05 min")


def test_the_remaining_time_of_a_resumed_run_counts_from_where_it_began() -> None:
    stream, now_s = io.StringIO(), 0.0
    bar = ProgressBar(stream, clock=lambda: now_s)
    bar.show("epoch 6/10", 0.5)
    now_s = 10.0
    bar.show("epoch 8/10", 0.75)
    bar.clear()
    assert "75%  ETA 10 s" in stream.getvalue()


def test_what_the_program_prints_removes_the_bar_first(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    bar = ProgressBar(terminal)
    bar.show("epoch 1/2", 0.5)
    print("a line", file=sys.stderr)
    assert terminal.getvalue().endswith("\r\x1b[Ka line\n")
    bar.clear()
    assert sys.stderr is terminal


def test_a_bar_of_tqdm_takes_the_place_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)

    class Bar:
        _instances = frozenset({object()})

    class Module:
        tqdm = Bar

    monkeypatch.setitem(sys.modules, "tqdm", Module)  # type: ignore[arg-type]
    ProgressBar(terminal).show("epoch 1/2", 0.5)
    assert terminal.getvalue() == ""


def test_the_bar_of_train_counts_the_samples_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    talk = RunTalk.open("auto")
    fields = {"epoch": 1, "num_epochs": 2, "seen": 100, "reached": 0, "total": 200, "loss": None}
    for rank, samples in ((1, 20), (0, 30)):
        talk.saw(Message(rank=rank, kind="progress", fields={**fields, "samples": samples}))
    talk.pause()
    assert "epoch 2/2  [##################......]   75%" in terminal.getvalue()
