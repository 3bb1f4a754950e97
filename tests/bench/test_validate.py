"""A baseline is saved, compared with, and not trusted across machines; only regressions fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.bench.report.validate import (
    IMPROVED,
    NOT_COMPARED,
    REGRESSION,
    SAME,
    ReferenceComparison,
    compare,
    make_baseline,
    read_baseline,
    render_comparisons,
)
from outrider.bench.suite.groups import Group, group_runs
from outrider.bench.suite.runs import Subject, read_runs
from outrider.errors import ConfigError, DataError

TellRun = Callable[..., Path]
SPEEDS = (1000.0, 1010.0, 990.0)
FINALS = (0.980, 0.981, 0.979)


@pytest.fixture
def tell(tell_run: TellRun, tmp_path: Path) -> Callable[..., list[Group]]:
    """Three seeds of one mode in a folder of their own, as groups."""

    def write(
        name: str, *, speeds: tuple[float, ...] = SPEEDS, finals: tuple[float, ...] = FINALS, **options: Any
    ) -> list[Group]:
        root = tmp_path / name
        for seed, (speed, final) in enumerate(zip(speeds, finals, strict=True)):
            tell_run("cpu-async", seed, speed=speed, evals=(0.9, 0.95, final), root=root, **options)
        return group_runs(read_runs(root))

    return write


def through_a_file(content: dict[str, Any]) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(json.dumps(content))
    return loaded


def verdicts(found: list[ReferenceComparison]) -> dict[str, str]:
    return {one.measure: one.verdict for one in found}


@pytest.fixture
def baseline(tell: Callable[..., list[Group]]) -> dict[str, Any]:
    return through_a_file(make_baseline(tell("before")))


def test_the_same_again_is_no_regression(tell: Callable[..., list[Group]], baseline: dict[str, Any]) -> None:
    found = compare(tell("now", speeds=(995.0, 1005.0, 985.0)), baseline)
    assert verdicts(found) == {"samples_per_s": SAME, "accuracy": SAME}


def test_a_clear_loss_of_speed_is_a_regression(tell: Callable[..., list[Group]], baseline: dict[str, Any]) -> None:
    found = compare(tell("now", speeds=(800.0, 810.0, 790.0)), baseline)
    assert verdicts(found) == {"samples_per_s": REGRESSION, "accuracy": SAME}


def test_a_clear_loss_of_quality_is_a_regression(tell: Callable[..., list[Group]], baseline: dict[str, Any]) -> None:
    found = compare(tell("now", finals=(0.950, 0.951, 0.949)), baseline)
    assert verdicts(found) == {"samples_per_s": SAME, "accuracy": REGRESSION}


def test_a_loss_within_the_noise_is_no_regression(tell: Callable[..., list[Group]], baseline: dict[str, Any]) -> None:
    found = compare(tell("now", speeds=(700.0, 1100.0, 800.0)), baseline)
    assert verdicts(found)["samples_per_s"] == SAME


def test_a_small_loss_that_is_certain_is_no_regression(
    tell: Callable[..., list[Group]], baseline: dict[str, Any]
) -> None:
    found = compare(tell("now", speeds=(970.0, 975.0, 965.0)), baseline)
    assert verdicts(found)["samples_per_s"] == SAME


def test_an_improvement_is_never_a_regression(tell: Callable[..., list[Group]], baseline: dict[str, Any]) -> None:
    found = compare(tell("now", speeds=(2000.0, 2010.0, 1990.0), finals=(0.990, 0.991, 0.989)), baseline)
    assert verdicts(found) == {"samples_per_s": IMPROVED, "accuracy": IMPROVED}


def test_a_loss_that_rises_is_a_regression_and_one_that_falls_is_not(tell: Callable[..., list[Group]]) -> None:
    loss = Subject(metric="loss", larger_is_better=False, is_stand_in=True, target=1.5)
    before = through_a_file(make_baseline(tell("losses", finals=(1.50, 1.51, 1.49), subject=loss)))
    risen = compare(tell("risen", finals=(1.70, 1.71, 1.69), subject=loss), before)
    fallen = compare(tell("fallen", finals=(1.30, 1.31, 1.29), subject=loss), before)
    assert (verdicts(risen)["loss"], verdicts(fallen)["loss"]) == (REGRESSION, IMPROVED)


def test_one_seed_is_not_compared(tell: Callable[..., list[Group]], baseline: dict[str, Any]) -> None:
    found = compare(tell("now", speeds=(100.0,), finals=(0.5,)), baseline)
    assert verdicts(found) == {"samples_per_s": NOT_COMPARED, "accuracy": NOT_COMPARED}
    assert found[0].reason == "needs 2 seeds on both sides, has 3 and 1"


def test_another_machine_is_refused(tell: Callable[..., list[Group]], baseline: dict[str, Any]) -> None:
    other = {"cpu": "sixty-four fast cores", "num_cores": 64, "gpus": ["H200"]}
    with pytest.raises(ConfigError) as caught:
        compare(tell("now", environment=other), baseline)
    assert caught.value.message == (
        "the baseline is of another machine: cpu two slow cores, num_cores 2, gpus []; "
        "here: cpu sixty-four fast cores, num_cores 64, gpus ['H200']"
    )
    assert caught.value.hint == "save a baseline of this machine with --save"


def test_other_conditions_are_not_compared(tell: Callable[..., list[Group]], baseline: dict[str, Any]) -> None:
    [found] = compare(tell("now", batch_size=128), baseline)
    assert found.verdict == NOT_COMPARED
    assert "batch_size 64" in found.reason
    assert "batch_size 128" in found.reason


def test_what_was_not_run_is_told(
    tell: Callable[..., list[Group]], tell_run: TellRun, tmp_path: Path, baseline: dict[str, Any]
) -> None:
    tell_run("ddp", root=tmp_path / "other")
    [found] = compare(group_runs(read_runs(tmp_path / "other")), baseline)
    assert (found.mode, found.verdict, found.reason) == ("cpu-async", NOT_COMPARED, "it was not run")


def test_a_baseline_of_mixed_machines_cannot_be_saved(tell_run: TellRun, tmp_path: Path) -> None:
    tell_run("solo-0", 0)
    tell_run("solo-0", 1, environment={"cpu": "another", "num_cores": 2, "gpus": []})
    with pytest.raises(ConfigError) as caught:
        make_baseline(group_runs(read_runs(tmp_path / "runs")))
    assert caught.value.message == (
        "the runs were made under unlike conditions: cpu two slow cores, num_cores 2, gpus []; "
        "cpu another, num_cores 2, gpus []"
    )


def test_nothing_finished_cannot_be_saved() -> None:
    with pytest.raises(DataError) as caught:
        make_baseline([])
    assert caught.value.message == "nothing is finished, so there is nothing to save"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "old.json is no baseline: schema_version, machine, models missing"),
        ({"schema_version": 9, "machine": {}, "models": {}}, "old.json has schema version 9, expected 1"),
    ],
)
def test_a_file_of_another_kind_is_refused(content: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        read_baseline(content, name="old.json")
    assert caught.value.message == message


def test_it_says_what_was_compared_in_80_columns(tell: Callable[..., list[Group]], baseline: dict[str, Any]) -> None:
    found = compare(tell("now", speeds=(800.0, 810.0, 790.0)), baseline)
    lines = render_comparisons(found, baseline=baseline).splitlines()
    assert lines[:2] == [
        "baseline: outrider 0.1.0, torch 2.13.0, python 3.11.7",
        "a regression is a loss of more than 5 % of the speed, and surely not noise",
    ]
    assert lines[4] == "lenet  cpu-async  speed      1,000   800  -22.3 to -17.7 %     regression"
    assert lines[-1] == "2 compared, 1 regression"
    assert max(map(len, lines)) <= 80
