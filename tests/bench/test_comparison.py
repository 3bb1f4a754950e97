"""`outrider compare`: targets, verdicts with numbers worked by hand, and a real comparison that goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.api.script_run import UserCommand
from outrider.bench.comparison.comparison_runs import PolicyComparison, _result, read_epochs, run_comparison
from outrider.bench.comparison.comparison_text import as_document, as_text
from outrider.bench.comparison.race import RaceRun, standings, verdict
from outrider.bench.comparison.target_metric import TargetMetric
from outrider.errors import ConfigError

SCRIPT = """
import sys
import torch
from torch import nn
import outrider

torch.manual_seed(0)
x = torch.randn(512, 4)
y = x.sum(1, keepdim=True)

def error(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])

run = outrider.train(
    lambda: nn.Linear(4, 1),
    lambda parameters: torch.optim.SGD(parameters, float(sys.argv[1])),
    error,
    (x, y),
    batch_size=16,
    epochs=30,
    evaluate=error,
    eval_dataset=(x, y),
)
run.join()
open("ended", "a").write("x")
"""


def runs(policy: str, *seconds: float | None) -> list[RaceRun]:
    return [RaceRun(policy=policy, seed=seed, seconds=one, epochs=5, best=0.9) for seed, one in enumerate(seconds)]


def told(*groups: list[RaceRun]) -> tuple[str | None, str]:
    found = verdict(standings([run for group in groups for run in group]))
    return found.first, found.reason


@pytest.mark.parametrize(
    ("text", "metric", "is_above", "value"),
    [
        ("eval>=0.97", "eval", True, 0.97),
        (" eval <= .5 ", "eval", False, 0.5),
        ("loss<=2e-1", "loss", False, 0.2),
        ("top/acc-5>=-1", "top/acc-5", True, -1.0),
    ],
)
def test_a_target_is_a_metric_a_sign_and_a_value(text: str, metric: str, is_above: bool, value: float) -> None:
    assert TargetMetric.parse(text) == TargetMetric(metric=metric, is_above=is_above, value=value)


@pytest.mark.parametrize("text", ["eval", "eval>0.9", "eval=0.9", ">=1", "eval>=high", "eval>=nan", ""])
def test_what_is_no_target_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no target in") as caught:
        TargetMetric.parse(text)
    assert caught.value.hint is not None
    assert '"eval>=0.97"' in caught.value.hint


def test_epochs_reach_a_target_from_its_side() -> None:
    above, below = TargetMetric.parse("eval>=0.9"), TargetMetric.parse("loss<=0.1")
    epochs: list[dict[str, Any]] = [{"eval": None, "loss": 0.3}, {"eval": 0.9, "loss": 0.2}, {"eval": 0.8, "loss": 0.1}]
    assert [above.is_reached(epoch) for epoch in epochs] == [False, True, False]
    assert [below.is_reached(epoch) for epoch in epochs] == [False, False, True]
    assert (above.best_of(epochs), below.best_of(epochs)) == (0.9, 0.1)
    assert TargetMetric.parse("top>=1").best_of([{"logged": {"top": 3.0}}, {}]) == 3.0


def test_the_first_is_named_where_intervals_do_not_overlap() -> None:
    # Of 9, 10, 11 the interval is 10 ± 4.303 / sqrt(3) = 7.52 to 12.48; that of 19, 20, 21 begins at 17.52.
    assert told(runs("sync", 19.0, 20.0, 21.0), runs("async", 9.0, 10.0, 11.0)) == (
        "async",
        "sync, the next, takes 2.00 times as long",
    )


def test_there_is_no_verdict_where_intervals_overlap() -> None:
    # 14 ± 2.48 begins at 11.52.
    first, reason = told(runs("sync", 13.0, 14.0, 15.0), runs("async", 9.0, 10.0, 11.0), runs("solo", 59.0, 60.0, 61.0))
    assert (first, reason) == (None, "the intervals of async and sync overlap")


def test_one_run_is_no_verdict() -> None:
    assert told(runs("sync", 13.0), runs("async", 9.0)) == (None, "one run shows no spread: use two seeds or more")


def test_a_policy_with_a_run_that_missed_the_target_is_not_compared() -> None:
    assert told(runs("sync", 13.0, 14.0), runs("async", 1.0, None)) == (
        "sync",
        "the only one that reached the target in all of its runs",
    )
    assert told(runs("sync", None, 3.0), runs("async", None, None)) == (
        None,
        "no policy reached the target in all of its runs",
    )


def test_the_text_fits_a_terminal_and_names_runs_that_missed(tmp_path: Path) -> None:
    comparison = made(tmp_path)
    text = as_text(comparison, [*runs("sync", 1234.5, 1235.5, 1236.5), *runs("async", 9.0, None, 10.0)])
    assert max(map(len, text.splitlines())) <= 80
    assert "async, seed 1: never in 5 epochs, best 0.9" in text
    assert text.endswith("first: sync; the only one that reached the target in all of its runs")


def test_a_run_that_failed_later_than_the_first_is_one_that_missed(tmp_path: Path) -> None:
    """As one policy that diverges: the others are still compared."""
    failing = SCRIPT.replace("run.join()", "run.join()\nif '/async/' in str(run.run_dir): raise SystemExit('diverged')")
    (tmp_path / "train.py").write_text(failing)
    comparison = made(tmp_path, policies="solo,async", target="eval<=-1", seeds=1)
    solo, failed = run_comparison(comparison)
    assert (solo.error, failed.seconds) == (None, None)
    assert "diverged" in (failed.error or "")
    assert "async, seed 0: failed after" in as_text(comparison, [solo, failed])
    assert run_comparison(comparison) == [solo, failed]


def made(folder: Path, **changed: Any) -> PolicyComparison:
    script = folder / "train.py"
    if not script.exists():
        script.write_text(SCRIPT)
    given = {"policies": "solo,sync", "devices": "cpu,cpu@0.5", "target": "eval<=0.01", "seeds": 2} | changed
    command = UserCommand(script=script, arguments=given.pop("arguments", ("0.05",)))
    return PolicyComparison.make(command, folder=folder / "out", **given)


def test_runs_are_interleaved_and_each_seed_begins_with_another_policy(tmp_path: Path) -> None:
    assert made(tmp_path, policies="solo,sync,async", seeds=2).order() == [
        ("solo", 0),
        ("sync", 0),
        ("async", 0),
        ("sync", 1),
        ("async", 1),
        ("solo", 1),
    ]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"policies": "sync"}, "one policy cannot be compared: 'sync'"),
        ({"policies": "sync,asink"}, "unknown policy 'asink'"),
        ({"seeds": 0}, "seeds must be >= 1, got 0"),
        ({"devices": "cpu"}, "policies differ on two devices or more, got cpu"),
        ({"target": "eval"}, "no target in 'eval'"),
    ],
)
def test_bad_input_is_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(tmp_path, **changed)
    assert caught.value.message == message
    assert caught.value.hint


def test_another_comparison_in_the_folder_is_refused(tmp_path: Path) -> None:
    kept = {"policy": "solo", "seed": 0, "seconds": 1.0, "epochs": 3, "best": 0.5}
    for policy in ("solo", "sync"):
        place = tmp_path / "out" / policy / "seed-0"
        place.mkdir(parents=True)
        (place / "result.json").write_text(json.dumps(kept | {"policy": policy}))
    # Nothing is left to run.
    assert [run.policy for run in run_comparison(made(tmp_path, seeds=1))] == ["solo", "sync"]
    with pytest.raises(ConfigError, match="holds a comparison with another target"):
        run_comparison(made(tmp_path, seeds=1, target="loss<=1"))
    (tmp_path / "train.py").write_text("changed")
    with pytest.raises(ConfigError, match="holds a comparison with another script"):
        run_comparison(made(tmp_path, seeds=1))


def test_the_epoch_that_reached_the_target_is_named(tmp_path: Path) -> None:
    comparison = made(tmp_path, target="loss<=0.5")
    (comparison.folder / "solo" / "seed-0").mkdir(parents=True)
    epochs = [{"loss": loss, "wall_s": 1.0 + at} for at, loss in enumerate((0.9, 0.5, 0.4))]
    found = _result(comparison, "solo", 0, epochs)
    assert (found.seconds, found.epochs, found.best) == (2.0, 2, 0.5)


def test_targets_that_look_alike_are_not_the_same(tmp_path: Path) -> None:
    close = [made(tmp_path, target=f"loss<=0.1234567{digit}").identity() for digit in (8, 9)]
    assert close[0] != close[1]


def test_a_half_written_epoch_does_not_count(tmp_path: Path) -> None:
    assert read_epochs(tmp_path) == []
    (tmp_path / "epochs.jsonl").write_text('{"eval": 1.0}\n{"eva')
    assert read_epochs(tmp_path) == [{"eval": 1.0}]


def test_a_script_without_outrider_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("pass")
    with pytest.raises(ConfigError, match="ended without training through outrider"):
        run_comparison(made(tmp_path))


@pytest.mark.slow
def test_a_real_comparison_stops_at_the_target_and_goes_on_after_an_interruption(tmp_path: Path) -> None:
    comparison = made(tmp_path)
    said: list[str] = []
    first = run_comparison(comparison, tell=said.append)
    assert [(run.policy, run.seed) for run in first] == [("solo", 0), ("solo", 1), ("sync", 0), ("sync", 1)]
    assert all(run.seconds is not None and run.seconds > 0 for run in first)
    # All were stopped before their 30 epochs, so that no line after the run was reached.
    assert all(run.epochs < 30 for run in first)
    assert not (tmp_path / "ended").exists()
    assert len(said) == 8
    document = as_document(comparison, first)
    assert [one["runs"] for one in document["policies"]] == [2, 2]
    (tmp_path / "out" / "sync" / "seed-1" / "result.json").unlink()
    said.clear()
    assert run_comparison(comparison, tell=said.append)[:3] == first[:3]
    assert [line for line in said if line.endswith("...")] == ["[3/4] sync, seed 1 ..."]


@pytest.mark.slow
def test_the_command_names_runs_that_never_reach_the_target(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("epochs=30", "epochs=2"))
    command = [sys.executable, "-m", "outrider", "compare", "train.py", "--devices", "cpu,cpu@0.5", "--seeds", "1"]
    command += ["--policies", "solo,balanced", "--target", "eval<=1e-9", "--", "1e-6"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "balanced, seed 0: never in 2 epochs, best " in ended.stdout
    assert ended.stdout.endswith("no verdict: no policy reached the target in all of its runs\n")
    assert (tmp_path / "ended").read_text() == "xx"
