"""`outrider advise` on real scripts and tasks: short runs, the forecast, and the receipt of a later run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import outrider
from outrider.api import advising
from outrider.api.options import _overridden, overridden
from outrider.api.session_hooks import SessionHooks
from outrider.errors import ConfigError
from outrider.record.run_folder import RunFolder
from outrider.world.environment import is_trial, overrides, script_variables

GUIDE = (Path(__file__).parents[2] / "docs" / "advise.md").read_text()
[TASK] = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)

SCRIPT = """
import argparse, pathlib
import torch
from torch import nn
import outrider

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
epochs = parser.parse_args().epochs
data = torch.utils.data.TensorDataset(torch.randn(4000, 4), torch.randn(4000, 1))
model = nn.Linear(4, 1)
with outrider.Session(policy="cadence", run_dir="mine", checkpoint_every=1) as s:
    model, optimizer = s.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
    for epoch in s.epochs(epochs):
        for x, y in s.batches(data, batch_size=16):
            s.step(nn.functional.mse_loss(model(x), y))
    pathlib.Path("after").touch()
"""


def advise(folder: Path, *arguments: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outrider", "advise", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s)


def test_overrides_go_before_the_options_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_OVERRIDES", '{"policy": "sync", "run_dir": "there"}')
    monkeypatch.setattr("outrider.api.options._overridden", [])
    assert overridden({"policy": "async", "seed": 3}) == {"policy": "sync", "run_dir": "there", "seed": 3}
    # A second run of the script must not write into the folder of the first.
    assert overridden({"policy": "async", "run_dir": "mine"}) == {"policy": "sync", "run_dir": "mine"}


@pytest.mark.parametrize(
    ("options", "batch_size"),
    [
        ({"batch_size": 16}, 16),
        ({"batch_size": [16, 8]}, 12),
        ({"batch_size": [2, 9], "batch_sampler": {"name": "Buckets"}}, 1),
    ],
    ids=["one size", "sizes per rank", "batch sampler"],
)
def test_the_work_of_a_run_is_counted_as_its_record_counts_it(
    tmp_path: Path, options: dict[str, object], batch_size: int
) -> None:
    record = {"num_samples": 40, "options": {**options, "steps": 10}}
    (tmp_path / "record.json").write_text(json.dumps(record))
    work = advising._workload(RunFolder(tmp_path))
    assert (work.batch_size, work.total_samples) == (batch_size, 10 * batch_size)


@pytest.mark.parametrize("shares_always", [True, False])
def test_the_work_of_a_loop_tells_whether_a_framework_runs_it(tmp_path: Path, shares_always: bool) -> None:
    model = nn.Linear(1, 1)
    with outrider.Session(devices="cpu", run_dir=tmp_path / "run") as s:
        if shares_always:
            SessionHooks(s).share_always()
        s.prepare(model, torch.optim.SGD(model.parameters(), 1e-6))
        for batch in s.batches(torch.ones(8, 1), batch_size=4):
            s.step(model(batch).mean())
    work = advising._workload(RunFolder(tmp_path / "run"))
    assert (work.may_rest, work.shares_always) == (False, shares_always)


def test_without_overrides_options_stay_as_they_are() -> None:
    assert overridden({"policy": "async"}) == {"policy": "async"}
    assert _overridden == []


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_overrides_that_are_no_object_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="OUTRIDER_OVERRIDES must be a JSON object of options"):
        overrides({"OUTRIDER_OVERRIDES": text})


def test_the_variables_of_a_script_say_what_it_is_to_do() -> None:
    told = script_variables({"seed": 1}, devices="cpu", variables={"OUTRIDER_TRIAL": "1", "HOME": "/h"})
    assert told == {"HOME": "/h", "OUTRIDER_OVERRIDES": '{"seed": 1}', "OUTRIDER_DEVICES": "cpu"}
    assert is_trial(script_variables({}, devices="cpu", is_trial=True, variables={}))
    assert not is_trial({"OUTRIDER_TRIAL": "0"})


def test_a_script_that_does_not_train_through_outrider_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("print('hello')")
    ended = advise(tmp_path, "other.py", "--devices", "cpu")
    assert ended.returncode == 1
    assert "error: other.py ended without training through outrider" in ended.stderr
    assert "hint: put its loop into `with outrider.Session() as s:` first" in ended.stderr


@pytest.mark.slow
def test_a_script_that_fails_shows_its_last_lines(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise ValueError('no data here')")
    ended = advise(tmp_path, "broken.py", "--devices", "cpu", "--", "--name", "a b")
    assert ended.returncode == 1
    assert "error: broken.py ended with exit code 1; its last lines:" in ended.stderr
    assert "  ValueError: no data here" in ended.stderr
    assert "hint: does it run by itself? python broken.py --name 'a b'" in ended.stderr


def test_an_error_of_ours_in_a_short_run_is_told_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "wired.py").write_text(
        "import outrider\nraise outrider.ConfigError('wire=bf16 is not for sync', hint='choose another policy')"
    )
    ended = advise(tmp_path, "wired.py", "--devices", "cpu")
    assert ended.returncode == 1
    refusal = "wired.py with policy=sync on cpu: wire=bf16 is not for sync\nhint: choose another policy"
    assert f"error: {refusal}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_what_was_measured_is_shown_where_it_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").touch()
    monkeypatch.setattr(advising, "as_document", lambda advice: {})
    advising._keep(None)  # type: ignore[arg-type]  # only its document is kept
    told = capsys.readouterr().err
    assert told.startswith("outrider: the forecast is not kept for later runs: cannot write ")


ADVISED_TASK = """
import os
from pathlib import Path
import torch
import outrider

def step(model, batch):
    Path(f"{os.environ['RANK']}-of-{os.environ['WORLD_SIZE']}").touch()
    return model(batch[0]).square().mean()

if __name__ == "__main__":
    advice = outrider.advise(
        lambda: torch.nn.Linear(4, 1), lambda p: torch.optim.SGD(p, 0.01), step, (torch.randn(4000, 4),),
        batch_size=16, epochs=100, devices="cpu", seconds=0.2,
    )
    print(advice.devices)
"""


@pytest.mark.slow
def test_devices_of_the_command_are_those_that_are_measured_each_by_itself(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(ADVISED_TASK)
    variables = {**os.environ, "OUTRIDER_DEVICES": "cpu,cpu@0.5"}
    ended = subprocess.run(
        [sys.executable, "task.py"], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "('cpu', 'cpu@0.5')\n"
    assert sorted(path.name for path in tmp_path.glob("*-of-*")) == ["0-of-1", "0-of-2", "1-of-2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing.py",), "error: there is no script missing.py"),
        (("here.py", "--devices", "gpu9"), "error: "),
        (("here.py", "--devices", "cpu", "--seconds", "0"), "error: seconds must be > 0, got 0"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    (tmp_path / "here.py").write_text("open('ran', 'w')")
    ended = advise(tmp_path, *arguments)
    assert (ended.returncode, message in ended.stderr) == (1, True), ended.stderr
    assert not (tmp_path / "ran").exists()


def test_a_short_run_of_slow_steps_goes_on_until_there_is_something_to_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(advising.time, "monotonic", lambda: now_s[0])
    (tmp_path / "trial").mkdir()
    plan = advising._TrialPlan(policy="sync", devices=("cpu", "cpu"), folder=tmp_path, seconds=2.0)
    deadline = advising._Deadline(plan)

    def is_over(at_s: float, reports: int) -> bool:
        now_s[0] = at_s
        (tmp_path / "trial" / "rank0.jsonl").write_text("{}\n" * (1 + reports))
        return deadline.is_over()

    assert not is_over(0.0, 1)
    # 40 steps after 2 s are enough; after 5 s 6 are, but never 5.
    assert [is_over(1.9, 40), is_over(2.1, 39), is_over(2.1, 40)] == [False, False, True]
    assert [is_over(99.0, 5), is_over(4.9, 6), is_over(5.1, 6)] == [False, False, True]


@pytest.mark.slow
def test_a_script_is_measured_forecast_and_compared_with_its_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ended = advise(
        tmp_path, "train.py", "--devices", "cpu,cpu@0.5", "--seconds", "0.5", "--json", "--", "--epochs", "99"
    )
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert "[6/8] async on cpu,cpu@0.5: " in ended.stderr
    assert "[8/8] cpu@0.5 alone: " in ended.stderr
    assert document["spread"] >= 0
    assert [(one["policy"], len(one["devices"])) for one in document["forecasts"]] == [
        ("solo", 1),
        ("solo", 1),
        ("auto", 2),
        ("sync", 2),
        ("balanced", 2),
        ("cadence", 2),
        ("async", 2),
    ]
    assert all(one["samples_per_s"] > 0 and min(one["memory_bytes"]) > 1e6 for one in document["forecasts"])
    work = document["workload"]
    assert (work["num_samples"], work["batch_size"], work["total_samples"]) == (4000, 16, 99 * 4000)
    # The loop was left before its end, and nothing of it was kept.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "train.py"]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["advice"]

    variables = {**os.environ, "OUTRIDER_DEVICES": "cpu,cpu@0.5"}
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=variables, check=True, timeout=300)
    record = json.loads((tmp_path / "mine" / "record.json").read_text())
    [expected] = [one["samples_per_s"] for one in document["forecasts"] if one["policy"] == "cadence"]
    told = record["forecast"]
    assert told["samples_per_s"] == expected
    assert told["measured_samples_per_s"] == record["totals"]["samples_per_s"]
    assert told["error"] == pytest.approx(expected / told["measured_samples_per_s"] - 1)


@pytest.mark.slow
def test_the_example_of_the_guide_runs(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK.replace("seconds=1", "seconds=0.3").replace("epochs=5", "epochs=200"))
    ended = subprocess.run([sys.executable, "task.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "\nset:    devices=" in ended.stdout
    assert list(tmp_path.glob("runs/*")) == [tmp_path / "runs" / "advice"]
