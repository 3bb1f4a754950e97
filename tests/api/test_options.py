"""How options are read: names, sequences and paths become what the runtime works with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.api.options import CheckedRun, make_order
from outrider.average.outer import Outer
from outrider.errors import ConfigError


def order(problem: dict[str, Any], **options: Any) -> CheckedRun:
    return make_order(problem, {"batch_size": 8, **options})


@pytest.mark.parametrize("kind", ["none", "nesterov", "slowmo"])
def test_an_outer_optimizer_goes_by_its_name(problem: dict[str, Any], kind: str) -> None:
    assert order(problem, outer=kind, policy="async").recipe.outer == Outer(kind=kind)


def test_an_outer_optimizer_may_be_given_with_its_settings(problem: dict[str, Any]) -> None:
    outer = Outer(kind="nesterov", lr=0.5, momentum=0.8)
    assert order(problem, outer=outer, policy="async").recipe.outer == outer


@pytest.mark.parametrize("policy", ["auto", "sync", "balanced"])
def test_an_outer_optimizer_is_refused_where_steps_are_shared(problem: dict[str, Any], policy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        order(problem, outer="nesterov", policy=policy)
    assert caught.value.message == f"outer='nesterov' was given, but policy {policy!r} shares exact steps"
    assert caught.value.hint == "it belongs to averages of parameters: pass a policy such as 'cadence'"


def test_devices_may_be_a_list(problem: dict[str, Any]) -> None:
    assert order(problem, devices=["cpu", "cpu@0.4"]).config.devices == ("cpu", "cpu@0.4")


@pytest.mark.parametrize("name", ["shares", "speed_hints"])
def test_numbers_of_ranks_may_be_any_sequence(problem: dict[str, Any], name: str) -> None:
    assert getattr(order(problem, **{name: [3, 1]}).recipe, name) == (3.0, 1.0)


def test_folders_may_be_relative_to_home_or_here(problem: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    given = order(problem, run_dir="~/runs/a", resume="b")
    assert given.config.run_dir == Path("/home/somebody/runs/a")
    assert given.config.resume == Path.cwd() / "b"


@pytest.mark.parametrize("name", ["overhead_target", "drift_threshold"])
def test_the_planner_follows_the_options_for_windows(problem: dict[str, Any], name: str) -> None:
    assert getattr(order(problem, **{name: 0.5}).recipe.planner_config(2, batch_size=1), name) == 0.5


def test_the_defaults_are_those_that_the_guide_promises(problem: dict[str, Any]) -> None:
    plain = order(problem)
    assert (plain.recipe.epochs, plain.recipe.policy, plain.recipe.precision) == (1, "auto", "fp32")
    assert (plain.recipe.overhead_target, plain.recipe.guard, plain.recipe.shuffle) == (0.02, True, True)
    assert (plain.config.devices, plain.config.backend, plain.config.workers) == ("auto", "auto", 0)
    assert (plain.config.verify, plain.config.checkpoint_every, plain.config.resume) == (False, "10min", None)
