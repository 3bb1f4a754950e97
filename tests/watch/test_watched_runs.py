"""The live page of real runs: served with `watch=True` until the run ends, and right about an injected delay."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outrider
from outrider.timeline.live_verdict import LiveVerdict, judge
from outrider.timeline.pulses import Pulse
from outrider.watch.run_reader import RunReader

PROBLEM: dict[str, Any] = {
    "model": lambda: nn.Linear(4, 1),
    "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "step": lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    "dataset": (torch.zeros(512, 4), torch.zeros(512, 1)),
    "batch_size": 16,
}
ADDRESS = re.compile(r"outrider: watch this run at (http://127\.0\.0\.1:\d+/[\w-]+/)")
PATIENCE_S = 90.0


def await_true(is_so: Callable[[], Any], what: str) -> Any:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        if found := is_so():
            return found
        time.sleep(0.1)
    raise AssertionError(f"waited in vain for {what}")


def view_at(address: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{address}view", timeout=20) as answer:
        content: dict[str, Any] = json.load(answer)
    return content


def test_the_page_of_a_run_is_served_until_it_ends(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = outrider.train(**PROBLEM, epochs=100_000, devices="cpu,cpu", watch=True, run_dir=tmp_path / "run")
    (address,) = ADDRESS.findall(capfd.readouterr().err)
    shown = await_true(lambda: (view := view_at(address))["run"] and view["run"]["samples"] and view, "samples")
    assert shown["run"]["name"] == "run"
    assert [rank["device"] for rank in shown["ranks"]] == ["cpu", "cpu"]
    run.stop()
    run.join()
    with pytest.raises(OSError, match="refused"):
        view_at(address)


def test_a_finished_run_can_be_read_as_a_record(tmp_path: Path) -> None:
    outrider.train(**PROBLEM, epochs=3, devices="cpu,cpu", policy="sync", run_dir=tmp_path).join()
    reader = RunReader(tmp_path)
    reader.refresh()
    assert reader.status == "finished"
    assert sum(pulse.samples for known in reader.pulses.values() for pulse in known) == 3 * 512
    losses = sum(pulse.loss_samples for known in reader.pulses.values() for pulse in known)
    assert 0 < losses <= 3 * 512
    assert reader.average_bytes


def test_a_session_serves_its_page(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with outrider.Session(devices="cpu", watch=True, run_dir=tmp_path) as session:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        (address,) = ADDRESS.findall(capfd.readouterr().err)
        for inputs, targets in session.batches(PROBLEM["dataset"], batch_size=16):
            session.step((model(inputs) - targets).square().mean())
        await_true(lambda: (view_at(address)["run"] or {}).get("samples") == 512, "the samples of the loop")
    with pytest.raises(OSError, match="refused"):
        view_at(address)


def test_a_missing_extra_is_told_before_any_rank_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "starlette", None)
    with pytest.raises(outrider.ConfigError, match="the live page needs starlette") as caught:
        outrider.train(**PROBLEM, epochs=1, devices="cpu", watch=True, run_dir=tmp_path / "run")
    assert caught.value.hint == "pip install 'outrider[watch]'"
    assert not (tmp_path / "run").exists()


def test_the_option_must_be_a_flag(tmp_path: Path) -> None:
    with pytest.raises(outrider.ConfigError, match="watch"):
        outrider.train(**PROBLEM, epochs=1, watch="yes", run_dir=tmp_path)


@pytest.mark.parametrize(("options", "value"), [(["--watch"], "1"), ([], "None")])
def test_the_command_line_asks_every_run_of_a_script(tmp_path: Path, options: list[str], value: str) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os; print(os.environ.get('OUTRIDER_WATCH'))")
    command = [sys.executable, "-m", "outrider", "run", *options, str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert ended.stdout.strip() == value


SCRIPT = """
import sys
import torch
from torch import nn
import outrider

data = torch.randn(20_000, 64), torch.randn(20_000, 1)
outrider.train(
    lambda: nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1)),
    lambda parameters: torch.optim.SGD(parameters, lr=0.001),
    lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    data, batch_size=64, epochs=100_000, devices="cpu,cpu", policy=sys.argv[1], run_dir=sys.argv[2],
    anchor=8 if sys.argv[1] == "cadence" else None, threads_per_rank=1,
).join()
"""


def seen_at(pulses: Mapping[int, list[Pulse]], at_s: float) -> LiveVerdict:
    """The verdict of a page that was looked at then."""
    return judge({rank: [one for one in known if one.end_s <= at_s] for rank, known in pulses.items()}, now_s=at_s)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "kind", "policy"),
    [
        ("data", "data", "cadence"),
        ("compute", "compute", "sync"),
        ("average", "link", "sync"),
        ("average", "link", "cadence"),
    ],
)
def test_a_delay_is_named_on_its_rank_ten_seconds_after_it_began(
    tmp_path: Path, policy: str, point: str, kind: str
) -> None:
    """In the time of the run, so that a busy machine does not decide."""
    script, folder = tmp_path / "script.py", tmp_path / "run"
    script.write_text(SCRIPT)
    first = 150 if policy == "cadence" and point == "average" else 1_500
    fault = f"rank=1,at={point},n={first},do=delay,seconds=0.2,times=0"
    job = subprocess.Popen(
        [sys.executable, str(script), policy, str(folder)],
        env={**os.environ, "OUTRIDER_FAULTS": fault},
        stderr=subprocess.DEVNULL,
    )
    log, reader = folder / "rank1.log", RunReader(folder)

    def last_s() -> float:
        reader.refresh()
        return min((known[-1].end_s for known in reader.pulses.values() if known), default=0.0)

    try:
        await_true(lambda: log.exists() and "fault on rank 1" in log.read_text(), "the first delay")
        assert reader.origin_s is not None or last_s()
        begun_s = time.time() - (reader.origin_s or 0.0)
        await_true(lambda: last_s() > begun_s + 10, "ten seconds more")
    finally:
        job.terminate()
        job.wait(60)
    verdict = seen_at(reader.pulses, begun_s + 10)
    assert (verdict.kind, verdict.rank) == (kind, 1), verdict
