"""The suite's table: what every entry promises, and the tasks that are made of it."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch import nn

from outrider.bench.datasets.dataset_files import find_data
from outrider.bench.datasets.source import COLLECTIONS, DataSource
from outrider.bench.tasks import Task, demo_task, speed_task
from outrider.bench.zoo import (
    ENTRIES,
    Entry,
    at_depth,
    entry_named,
    suite_task,
    tenth_at_half_and_three_quarters,
    warm_up_then_cosine,
)
from outrider.data.feed import make_feed
from outrider.data.order import in_order
from outrider.errors import ConfigError
from outrider.replica.recipe import Recipe, SchedulerFactory
from outrider.virtual.lab import Bench, train

pytestmark = pytest.mark.usefixtures("one_thread")

BESIDE = Path(__file__).resolve().parents[3] / "shared" / "data"
PLACE = os.environ.get("OUTRIDER_DATA") or BESIDE
STAND_IN = DataSource(may_download=False, max_samples=256)


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without data."""
    monkeypatch.delenv("OUTRIDER_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


# The table.


def test_the_suite_has_eight_models() -> None:
    names = ["logistic", "mlp", "lenet", "conv-ae", "char-rnn", "gpt-nano", "resnet20", "resnet20-graph"]
    assert list(ENTRIES) == names
    assert [entry.name for entry in ENTRIES.values()] == names


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_every_entry_has_the_parameters_it_says(entry: Entry) -> None:
    assert sum(parameter.numel() for parameter in entry.make_model().parameters()) == entry.num_parameters


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_every_entry_has_data_and_a_target(entry: Entry) -> None:
    assert entry.data in COLLECTIONS
    assert entry.target is not None
    assert entry.larger_is_better == (entry.metric == "accuracy")


def test_published_figures_are_those_of_the_literature() -> None:
    assert {name: entry.published for name, entry in ENTRIES.items()} == {
        "logistic": 0.92,
        "mlp": 0.97,
        "lenet": 0.99,
        "conv-ae": None,
        "char-rnn": 1.5,
        "gpt-nano": 2.0,
        "resnet20": 0.9125,
        "resnet20-graph": 0.9125,
    }


def test_the_resnets_train_longer_and_with_larger_batches() -> None:
    assert {(entry.epochs, entry.batch_size) for name, entry in ENTRIES.items() if "resnet" in name} == {(200, 128)}
    assert {(entry.epochs, entry.batch_size) for name, entry in ENTRIES.items() if "resnet" not in name} == {(5, 64)}


def test_a_mistyped_model_gets_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        entry_named("resnet2")
    assert str(caught.value) == (
        "no model is called 'resnet2', known are: logistic, mlp, lenet, conv-ae, char-rnn, gpt-nano, resnet20, "
        "resnet20-graph\nhint: did you mean 'resnet20'?"
    )


# Depth.


@pytest.mark.parametrize(("name", "expected"), [("resnet20", "resnet32"), ("resnet20-graph", "resnet32-graph")])
def test_another_depth_has_its_own_name_figure_and_count(name: str, expected: str) -> None:
    entry = at_depth(entry_named(name), 32)
    assert (entry.name, entry.published, entry.num_parameters) == (expected, 0.9249, 464_154)
    assert sum(parameter.numel() for parameter in entry.make_model().parameters()) == 464_154


def test_a_depth_that_nobody_published_has_no_figure() -> None:
    assert at_depth(entry_named("resnet20"), 14).published is None


def test_a_model_without_a_depth_refuses_one() -> None:
    with pytest.raises(ConfigError) as caught:
        suite_task("lenet", data=STAND_IN, depth=32)
    assert str(caught.value) == ("lenet has no depth to choose, got depth=32\nhint: leave depth out, or take resnet20")


# Schedules.


def rates(factory: SchedulerFactory, num_steps: int) -> list[float]:
    """The learning rate of every step, where the full one is 1."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = factory(optimizer)
    seen = []
    for _ in range(num_steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_resnets_take_a_tenth_at_half_and_a_hundredth_at_three_quarters() -> None:
    expected = [1.0] * 4 + [0.1] * 2 + [0.01] * 2
    assert rates(tenth_at_half_and_three_quarters(8), 8) == pytest.approx(expected)


def test_gpt_warms_up_over_a_tenth_and_then_follows_a_cosine_to_zero() -> None:
    seen = rates(warm_up_then_cosine(100), 101)
    assert seen[:10] == pytest.approx([0.1 * tick for tick in range(1, 11)])
    assert seen[55] == pytest.approx(0.5)
    assert seen[10:] == sorted(seen[10:], reverse=True)
    assert seen[100] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_run_of_few_steps_still_has_a_schedule(num_steps: int) -> None:
    assert max(rates(warm_up_then_cosine(num_steps), num_steps)) == 1.0


def test_the_schedule_spans_the_samples_of_all_epochs() -> None:
    task = suite_task("resnet20", data=STAND_IN, epochs=4)
    assert task.scheduler is not None
    # 256 samples in batches of 128 are 2 ticks per epoch: 8 in all.
    assert rates(task.scheduler, 8)[3:5] == pytest.approx([1.0, 0.1])


def test_where_a_step_takes_several_batches_the_rate_of_resnets_rises_over_a_fortieth_of_the_schedule() -> None:
    assert suite_task("resnet20", data=STAND_IN, epochs=80).joined_warm_up == 4
    assert suite_task("resnet20", data=STAND_IN, epochs=1).joined_warm_up == 1
    assert suite_task("lenet", data=STAND_IN).joined_warm_up is None


# Tasks.


def test_a_task_has_the_entrys_settings_unless_told_otherwise() -> None:
    task = suite_task("char-rnn", data=STAND_IN, seed=3)
    assert (task.name, task.batch_size, task.epochs, task.seed) == ("char-rnn", 64, 5, 3)
    assert (task.metric, task.larger_is_better, task.max_grad_norm) == ("loss", False, 5.0)
    other = suite_task("char-rnn", data=STAND_IN, epochs=2, batch_size=32)
    assert (other.epochs, other.batch_size) == (2, 32)


def test_a_stand_in_is_named_and_never_held_against_published_figures() -> None:
    task = suite_task("mlp", data=DataSource(may_download=False))
    assert (task.data_name, task.is_stand_in, task.published) == ("glyphs (stand-in)", True, None)
    assert task.target == ENTRIES["mlp"].stand_in_target


@pytest.mark.skipif(find_data("mnist", PLACE) is None, reason="MNIST is not here; set OUTRIDER_DATA to its folder")
def test_real_data_are_held_against_published_figures_when_whole() -> None:
    task = suite_task("mlp", data=DataSource(folder=PLACE))
    assert (task.data_name, task.is_stand_in, task.published, task.target) == ("MNIST", False, 0.97, 0.975)
    part = suite_task("mlp", data=DataSource(folder=PLACE, max_samples=6_000))
    assert (part.data_name, part.is_stand_in, part.published) == ("MNIST, first 6,000", False, None)
    assert (len(part.dataset()), len(part.eval_dataset())) == (6_000, 1_000)


@pytest.mark.parametrize("name", ENTRIES)
def test_a_task_travels_light(name: str) -> None:
    task = suite_task(name, data=DataSource(may_download=False))
    parts = (task.model, task.optimizer, task.step, task.dataset, task.evaluate, task.eval_dataset, task.scheduler)
    assert len(cloudpickle.dumps((*parts, task.augment))) < 2_000


@pytest.mark.parametrize("name", ENTRIES)
def test_data_become_resident_tensors_without_python_per_sample(name: str) -> None:
    task = suite_task(name, data=STAND_IN)
    feed = make_feed(task.dataset, device="cpu", seed=0)
    feed.start_epoch(in_order(feed.num_samples), 0)
    assert feed.reason.startswith("tensors of ")


@pytest.mark.parametrize(
    ("name", "max_samples", "options"),
    [
        ("logistic", 256, {"batch_size": 16}),
        ("conv-ae", 256, {"batch_size": 16}),
        ("gpt-nano", 8, {"batch_size": 2}),
        ("resnet20-graph", 64, {"batch_size": 16, "depth": 8}),
    ],
)
def test_a_model_of_the_suite_learns_in_the_lab(name: str, max_samples: int, options: dict[str, int]) -> None:
    data = DataSource(may_download=False, max_samples=max_samples)
    first, second = train(recipe_of(suite_task(name, data=data, epochs=2, **options)), Bench(speeds=(1.0,))).points
    assert second.loss < first.loss
    assert second.eval is not None


def recipe_of(task: Task) -> Recipe:
    names = {field.name for field in fields(Recipe)} & {field.name for field in fields(Task)}
    return Recipe(**{name: getattr(task, name) for name in names})


# The older tasks.


def test_the_demo_and_the_speed_tasks_say_that_their_data_are_stand_ins() -> None:
    assert demo_task(epochs=1, num_train=20, num_test=10).is_stand_in
    assert speed_task("mlp", epochs=1, num_samples=10).is_stand_in
