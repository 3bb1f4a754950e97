"""Names of modes, the orders they become, and the arithmetic of a summary."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import TensorDataset

from outrider.bench.measures import samples_per_s, time_to_target_s
from outrider.bench.models.image_models import accuracy, cross_entropy_step, logistic
from outrider.bench.modes import (
    Mode,
    ModeResult,
    fits,
    ideal_samples_per_s,
    make_mode_order,
    mode_names,
    obstacle,
    parse_mode,
    starter_of,
    summarise,
)
from outrider.bench.peers.peer_table import PEERS
from outrider.bench.tasks import Task, adam
from outrider.bench.zoo import ENTRIES
from outrider.errors import ConfigError
from outrider.machine.devices import num_cores, parse_devices, threads_per_rank
from outrider.record.epoch_metrics import EpochMetrics

DEVICES = parse_devices("cpu,cpu@0.4")


def epoch(number: int, *, seconds: float, train_s: float, accuracy: float | None = None) -> EpochMetrics:
    return EpochMetrics(
        epoch=number,
        loss=1.0,
        eval=accuracy,
        samples=100,
        seconds=seconds,
        samples_per_s=100 / seconds,
        share_by_rank=(0.7, 0.3),
        learning_rate=1e-3,
        averages=4,
        anchor=2,
        drift=None,
        exposed_average_fraction=0.1 * seconds,
        wait_fraction=0.2 * seconds,
        eval_s=0.1,
        train_s=train_s,
        wall_s=train_s,
        is_complete=True,
    )


WARM_UP = epoch(0, seconds=10.0, train_s=10.0, accuracy=0.90)
FAST = epoch(1, seconds=1.0, train_s=11.0, accuracy=0.97)
SLOW = epoch(2, seconds=3.0, train_s=14.0, accuracy=0.96)
RESULT = ModeResult(mode="cpu-cadence", epochs=(WARM_UP, FAST, SLOW), run_dir=Path("runs/cpu-cadence"))


def task() -> Task:
    images = TensorDataset(torch.zeros(4, 784), torch.zeros(4, dtype=torch.int64))
    return Task(
        name="logistic",
        data_name="zeros (stand-in)",
        model=logistic,
        optimizer=adam,
        step=cross_entropy_step,
        dataset=images,
        batch_size=2,
        epochs=3,
        evaluate=accuracy,
        eval_dataset=images,
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("solo-1", Mode(name="solo-1", policy="independent", solo_rank=1)),
        ("ddp", Mode(name="ddp", policy="sync", peer="ddp")),
        (
            "accelerate-local-sgd-tuned",
            Mode(name="accelerate-local-sgd-tuned", policy="sync", peer="accelerate-local-sgd-tuned"),
        ),
        ("independent", Mode(name="independent", policy="independent")),
        ("graph-sync", Mode(name="graph-sync", policy="sync")),
        ("cpu-async", Mode(name="cpu-async", policy="async", backend="cpu")),
        ("nccl-balanced", Mode(name="nccl-balanced", policy="balanced", backend="nccl")),
        ("cadence", Mode(name="cadence", policy="cadence", backend="auto")),
    ],
)
def test_a_name_says_policy_backend_and_device(name: str, expected: Mode) -> None:
    assert parse_mode(name, num_devices=2) == expected


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("cpu-asynch", "no mode is called 'cpu-asynch' for 2 devices", "did you mean 'cpu-async'?"),
        ("solo-2", "no mode is called 'solo-2' for 2 devices", "did you mean 'solo-1'?"),
        (
            "everything",
            "no mode is called 'everything' for 2 devices",
            "modes are solo-0, solo-1, independent, graph-sync, cpu-auto, cpu-sync, cpu-balanced, cpu-cadence, "
            f"cpu-async, nccl-auto, nccl-sync, nccl-balanced, nccl-cadence, nccl-async, {', '.join(PEERS)}",
        ),
    ],
)
def test_an_unknown_name_is_told_with_the_nearest(name: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_mode(name, num_devices=2)
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_a_solo_gets_its_device_and_the_threads_it_has_in_the_whole_world(tmp_path: Path) -> None:
    order = make_mode_order(parse_mode("solo-1", num_devices=2), task(), devices=DEVICES, run_dir=tmp_path)
    assert order.config.devices == ("cpu@0.4",)
    assert order.config.threads_per_rank == threads_per_rank(DEVICES, num_cores())[1]


@pytest.mark.parametrize("name", ["cpu-auto", "balanced", "ddp"])
def test_a_rank_that_works_alone_takes_no_threads_from_those_that_rest(name: str, tmp_path: Path) -> None:
    order = make_mode_order(parse_mode(name, num_devices=2), task(), devices=DEVICES, run_dir=tmp_path)
    assert order.config.threads_per_rank == threads_per_rank(DEVICES, num_cores())[0]


def test_every_name_that_is_listed_can_be_parsed() -> None:
    assert [parse_mode(name, num_devices=2).name for name in mode_names(2)] == mode_names(2)


def test_nccl_cannot_run_on_a_cpu_and_says_why() -> None:
    reason = obstacle(parse_mode("nccl-async", num_devices=2), DEVICES)
    assert reason == "rank 0 is on cpu, and nccl joins CUDA devices only"


@pytest.mark.parametrize("name", ["solo-1", "independent", "cpu-async", "ddp"])
def test_modes_of_cpu_ranks_can_run_on_them(name: str) -> None:
    assert obstacle(parse_mode(name, num_devices=2), DEVICES) is None


def test_a_peer_is_started_by_its_own_function() -> None:
    assert starter_of(parse_mode("ddp", num_devices=2)) == PEERS["ddp"].start


def test_graph_sync_takes_models_written_as_a_flow_only() -> None:
    mode = parse_mode("graph-sync", num_devices=2)
    assert [name for name in ENTRIES if fits(mode, name)] == ["resnet20-graph"]


def test_options_set_by_hand_go_before_the_task(tmp_path: Path) -> None:
    order = make_mode_order(
        parse_mode("cpu-cadence", num_devices=2),
        task(),
        devices=DEVICES,
        run_dir=tmp_path,
        settings={"max_grad_norm": 2.0, "shares": [0.6, 0.4]},
    )
    assert (order.recipe.max_grad_norm, order.recipe.shares) == (2.0, (0.6, 0.4))


def test_a_solo_takes_no_option_that_has_a_value_per_rank(tmp_path: Path) -> None:
    order = make_mode_order(
        parse_mode("solo-0", num_devices=2), task(), devices=DEVICES, run_dir=tmp_path, settings={"shares": [0.6, 0.4]}
    )
    assert order.recipe.shares is None


@pytest.mark.parametrize("name", ["solo-0", "ddp", "cpu-sync", "cpu-balanced", "cpu-cadence", "cpu-async"])
def test_all_modes_share_batch_epochs_seed_and_evaluation(name: str, tmp_path: Path) -> None:
    recipe = make_mode_order(parse_mode(name, num_devices=2), task(), devices=DEVICES, run_dir=tmp_path).recipe
    assert (recipe.batch_size, recipe.epochs, recipe.seed, recipe.evaluate) == (2, 3, 0, accuracy)


@pytest.mark.parametrize(
    ("name", "lr_scale"),
    [("cpu-sync", 2.0), ("graph-sync", 2.0), ("ddp", 2.0), ("dp", 2.0)]
    + [(name, "auto") for name in ("solo-0", "independent", "cpu-balanced", "cpu-cadence", "post-local-sgd")],
)
def test_the_rate_follows_the_batch_where_a_step_takes_one_of_every_rank(
    name: str, lr_scale: float | str, tmp_path: Path
) -> None:
    mode, follows = parse_mode(name, num_devices=2), replace(task(), joined_warm_up=4)
    assert make_mode_order(mode, follows, devices=DEVICES, run_dir=tmp_path).recipe.lr_scale == lr_scale
    assert make_mode_order(mode, task(), devices=DEVICES, run_dir=tmp_path).recipe.lr_scale == "auto"


def test_a_rate_set_by_hand_stays(tmp_path: Path) -> None:
    follows = replace(task(), joined_warm_up=4)
    mode = parse_mode("cpu-sync", num_devices=2)
    recipe = make_mode_order(mode, follows, devices=DEVICES, run_dir=tmp_path, settings={"lr_scale": 1.0}).recipe
    assert (recipe.lr_scale, recipe.scheduler) == (1.0, None)


def test_runs_that_are_no_records_have_the_defaults_of_train(tmp_path: Path) -> None:
    mode = parse_mode("cpu-cadence", num_devices=2)
    made = make_mode_order(mode, task(), devices=DEVICES, run_dir=tmp_path, as_published=False).recipe
    published = make_mode_order(mode, task(), devices=DEVICES, run_dir=tmp_path).recipe
    assert (made.lr_scale, made.min_anchor) == (1.0, 1)
    assert (published.lr_scale, published.min_anchor) == ("auto", 20)


@pytest.mark.parametrize("name", ["cpu-sync", "graph-sync", "ddp"])
def test_a_rate_for_several_batches_rises_from_that_for_one(name: str, tmp_path: Path) -> None:
    halving = partial(MultiStepLR, milestones=[6], gamma=0.5)
    follows = replace(task(), scheduler=halving, joined_warm_up=4)
    recipe = make_mode_order(parse_mode(name, num_devices=2), follows, devices=DEVICES, run_dir=tmp_path).recipe
    assert recipe.scheduler is not None
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], recipe.lr_scale)
    scheduler, rates = recipe.scheduler(optimizer), []
    for _ in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([1.0, 1.25, 1.5, 1.75, 2.0, 2.0, 1.0, 1.0])


def test_the_resnets_follow_the_batch_and_the_models_with_adam_do_not() -> None:
    assert [name for name, entry in ENTRIES.items() if entry.joined_warm_up is not None] == [
        "resnet20",
        "resnet20-graph",
    ]


def test_ranks_that_never_average_are_not_evaluated(tmp_path: Path) -> None:
    order = make_mode_order(parse_mode("independent", num_devices=2), task(), devices=DEVICES, run_dir=tmp_path)
    assert order.recipe.evaluate is None


def test_the_first_epoch_is_warm_up() -> None:
    assert samples_per_s(RESULT.epochs) == 200 / 4


def test_a_single_epoch_is_counted() -> None:
    assert samples_per_s(RESULT.epochs[:1]) == 10


def test_time_to_target_is_the_training_time_of_the_first_epoch_that_reached_it() -> None:
    assert time_to_target_s(RESULT.epochs, 0.95) == 11.0


def test_the_target_of_a_loss_is_reached_from_above() -> None:
    assert time_to_target_s(RESULT.epochs, 0.90, larger_is_better=False) == 10.0


def test_a_target_never_reached_has_no_time() -> None:
    assert time_to_target_s(RESULT.epochs, 0.99) is None


def test_a_summary_compares_with_the_solos() -> None:
    summary = summarise(RESULT, ideal=80.0, solo=40.0, target=0.95)
    assert (summary.samples_per_s, summary.efficiency, summary.speedup) == (50.0, 0.625, 1.25)


def test_a_summary_has_the_last_evaluation_and_all_averages() -> None:
    summary = summarise(RESULT, ideal=None, solo=None, target=0.95)
    assert (summary.eval, summary.averages, summary.efficiency, summary.speedup) == (0.96, 12, None, None)


def test_fractions_are_means_over_training_time() -> None:
    summary = summarise(RESULT, ideal=80.0, solo=40.0, target=0.95)
    assert summary.exposed_average_fraction == pytest.approx((0.1 * 1 + 0.3 * 3) / 4)
    assert summary.wait_fraction == pytest.approx((0.2 * 1 + 0.6 * 3) / 4)


def test_the_ideal_is_the_sum_of_the_solos() -> None:
    results = {"solo-0": RESULT, "solo-1": RESULT}
    assert ideal_samples_per_s(results, num_devices=2) == 100.0


def test_the_ideal_is_not_known_without_every_solo() -> None:
    assert ideal_samples_per_s({"solo-0": RESULT}, num_devices=2) is None
