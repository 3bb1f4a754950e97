"""What a scaling comparison runs, and what it says of the numbers it is given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.bench.modes import ModeResult
from outrider.bench.scaling import scaling_measure as measure
from outrider.bench.scaling.finding import finding
from outrider.bench.scaling.scaling_measure import check_models, compare_ways, model_maker
from outrider.bench.scaling.scaling_plan import Job, ScalingPlan, jobs
from outrider.bench.scaling.scaling_record import ScalingRecord, ScalingRow, standings
from outrider.bench.scaling.scaling_text import render
from outrider.errors import ConfigError, StepError
from outrider.machine.devices import parse_devices
from outrider.record.epoch_metrics import EpochMetrics

COUNTED = "2 of 3 epochs count: the first is warm-up; 1 run per way, so differences of a few percent may be chance."


def row(way: str, devices: str, speed: float, **fields: Any) -> ScalingRow:
    return ScalingRow(
        model="resnet18",
        way=way,
        devices=tuple(devices.split(",")),
        epoch_s=(1000 / speed,),
        samples_per_s=speed,
        **fields,
    )


def record(*rows: ScalingRow) -> ScalingRecord:
    return ScalingRecord(
        rows=rows, data_name="CIFAR-10", batch_size=512, epochs=3, rounds=1, num_samples=50_000, environment={}
    )


EQUAL = record(
    row("single", "cuda:0", 100.0),
    row("single", "cuda:1", 100.0),
    row("dp", "cuda:0,cuda:1", 50.0),
    row("ddp", "cuda:0,cuda:1", 192.0, average_part=0.04, wait_part=0.0, peak_memory_bytes=(10_000_000, 10_000_000)),
    row("fsdp", "cuda:0,cuda:1", 150.0, average_part=0.2, wait_part=0.05, peak_memory_bytes=(6_000_000, 6_000_000)),
    row("async", "cuda:0,cuda:1", 190.0, average_part=0.0, wait_part=0.0),
)
UNEQUAL = record(
    row("single", "cpu", 100.0),
    row("single", "cpu@0.4", 40.0),
    row("ddp", "cpu,cpu@0.4", 80.0, average_part=0.01, wait_part=0.29),
    row("balanced", "cpu,cpu@0.4", 133.0, average_part=0.03, wait_part=0.01),
    row("async", "cpu,cpu@0.4", 135.0, average_part=0.0, wait_part=0.0),
)


def test_speed_up_is_against_the_first_device_and_efficiency_against_all_alone() -> None:
    ddp = standings(UNEQUAL.rows)[2]
    assert (ddp.speedup, ddp.efficiency) == (pytest.approx(0.8), pytest.approx(80 / 140))


def test_a_device_that_was_not_measured_alone_leaves_the_efficiency_unknown() -> None:
    assert standings(UNEQUAL.rows[1:])[1].efficiency is None


def test_equal_devices_are_told_what_to_use_and_why_the_others_lose() -> None:
    assert finding(EQUAL) == [
        "resnet18: on 2 devices use torch DDP: 1.92 times the fastest alone, 96 % of what the devices give alone.",
        "resnet18: FSDP2 loses 25 %: communication takes 20 % of the time, ranks wait 5 % of the time for each other, "
        "parameters are gathered again in every forward and backward pass.",
        "resnet18: DataParallel loses 75 %: one process copies the model to every device at each step and gathers the "
        "outputs on the first.",
        "resnet18: FSDP2 needs 40 % less memory per rank; take it where the model does not fit.",
        COUNTED,
    ]


def test_unequal_devices_are_told_what_ddp_loses() -> None:
    assert finding(UNEQUAL) == [
        "resnet18: on 2 devices use outrider async: 1.35 times the fastest alone, 96 % of what the devices give alone.",
        "resnet18: your devices are unequal by 2.5x: DDP loses 43 %, use balanced or async.",
        "resnet18: torch DDP loses 43 %: ranks wait 29 % of the time for each other.",
        COUNTED,
    ]


def test_where_ddp_did_not_run_its_loss_is_computed() -> None:
    sentences = finding(record(*UNEQUAL.rows[:2], UNEQUAL.rows[4]))
    assert sentences[1] == "resnet18: your devices are unequal by 2.5x: DDP would lose 43 %, use async."


def test_where_no_policy_did_better_nothing_is_advised() -> None:
    sentences = finding(record(*UNEQUAL.rows[:3]))
    assert sentences[0] == (
        "resnet18: use the fastest device alone; the quickest way to use 2, torch DDP, has 0.80 times its speed, "
        "57 % of what the devices give alone."
    )
    assert (
        sentences[1]
        == "resnet18: your devices are unequal by 2.5x: DDP loses 43 %, no policy beats the fastest device alone."
    )


def test_a_way_that_beats_ddp_but_not_the_fastest_device_alone_is_not_advised() -> None:
    # 95 of 140 samples per second are 68 %, more than the 57 of DDP, and less than one device has alone.
    resting = row("balanced", "cpu,cpu@0.4", 95.0)
    sentences = finding(record(*UNEQUAL.rows[:3], UNEQUAL.rows[4], resting))
    assert sentences[1] == "resnet18: your devices are unequal by 2.5x: DDP loses 43 %, use async."


def test_one_device_leaves_nothing_to_compare() -> None:
    assert finding(record(EQUAL.rows[0])) == [
        "resnet18: nothing ran on more than one device, so there is nothing to compare.",
        COUNTED,
    ]


def test_what_equal_devices_could_not_measure_is_communication() -> None:
    slow = row("sync", "cuda:0,cuda:1", 120.0)
    expected = "resnet18: outrider sync loses 40 %: the devices are equally fast, so it goes to communication."
    assert finding(record(*EQUAL.rows, slow))[2] == expected


def test_what_unequal_devices_could_not_measure_is_computed_from_their_speeds() -> None:
    blind = row("ddp", "cpu,cpu@0.4", 77.0)
    expected = "resnet18: torch DDP loses 45 %: by the speeds alone, keeping step with the slowest device costs 43 %."
    assert finding(record(*UNEQUAL.rows[:2], *UNEQUAL.rows[3:], blind))[2] == expected


def test_the_table_ends_with_what_cannot_run_and_the_finding() -> None:
    obstacle = ScalingRow(model="resnet18", way="dp", devices=("cpu", "cpu@0.4"), obstacle="needs two CUDA devices")
    lines = render(record(*UNEQUAL.rows, obstacle)).splitlines()
    assert lines[0] == (
        "CIFAR-10, 50,000 samples per epoch, batch 512 per device, SGD 0.1 with momentum 0.9 and weight decay 5e-4, "
        "crop and flip; times are of 3 epochs without the first"
    )
    assert lines[7].split() == ["torch", "DDP", "cpu,cpu@0.4", "12.50", "80", "0.80", "57%", "1.0%", "29.0%", "-"]
    assert "resnet18, DataParallel on 2 devices cannot run here: needs two CUDA devices" in lines
    assert lines[-1] == COUNTED


def test_every_device_runs_alone_and_every_way_on_two_four_and_all() -> None:
    plan = ScalingPlan(
        models=("resnet18",), devices=parse_devices("cpu,cpu,cpu@0.4"), output=Path("runs"), ways=("ddp", "async")
    )
    assert [(job.way, ",".join(map(str, job.devices))) for job in jobs(plan)] == [
        ("single", "cpu"),
        ("single", "cpu@0.4"),
        ("ddp", "cpu,cpu"),
        ("async", "cpu,cpu"),
        ("ddp", "cpu,cpu,cpu@0.4"),
        ("async", "cpu,cpu,cpu@0.4"),
    ]


@pytest.mark.parametrize(
    ("setting", "message", "hint"),
    [
        ({"ways": ("dpp",)}, "no way to use several devices is called 'dpp'", "did you mean 'dp'?"),
        ({"epochs": 1}, "epochs must be >= 2, got 1", "the first is warm-up and not counted"),
        ({"batch_size": 0}, "batch_size must be >= 1, got 0", "pass --batch-size 512"),
        ({"rounds": 0}, "rounds must be >= 1, got 0", "pass --rounds 1"),
        ({"models": ()}, "no model was named", "pass --model resnet18"),
    ],
)
def test_settings_that_cannot_work_are_refused(setting: dict[str, Any], message: str, hint: str) -> None:
    plan = ScalingPlan(models=("resnet18",), devices=parse_devices("cpu"), output=Path("runs"))
    with pytest.raises(ConfigError) as refusal:
        replace(plan, **setting)
    assert (refusal.value.message, refusal.value.hint) == (message, hint)


def test_an_unknown_model_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError) as refusal:
        check_models(["resnet18", "resnet340"])
    assert refusal.value.message.startswith(
        "no model for CIFAR-10 is called 'resnet340', known are: resnet18, resnet34"
    )
    assert refusal.value.hint == "did you mean 'resnet34'?"


def test_models_have_a_head_for_ten_classes() -> None:
    assert model_maker("resnet18")().fc.out_features == 10


def epoch(number: int, seconds: float) -> EpochMetrics:
    return EpochMetrics(
        epoch=number,
        loss=1.0,
        eval=None,
        samples=100,
        seconds=seconds,
        samples_per_s=100 / seconds,
        share_by_rank=(1.0,),
        learning_rate=0.1,
        averages=0,
        anchor=None,
        drift=None,
        exposed_average_fraction=0.0,
        wait_fraction=0.0,
        eval_s=0.0,
        train_s=seconds,
        wall_s=seconds,
        is_complete=True,
    )


def test_a_way_that_fails_is_told_and_what_was_measured_before_and_after_it_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(job: Job, *_: Any) -> ModeResult:
        if job.way == "ddp":
            raise StepError("rank 1 has no memory left")
        return ModeResult(mode=job.way, epochs=(epoch(0, 9.0), epoch(1, 2.0)), run_dir=tmp_path)

    monkeypatch.setattr(measure, "_run", run)
    plan = ScalingPlan(
        models=("resnet18",),
        devices=parse_devices("cpu,cpu"),
        output=tmp_path,
        ways=("ddp", "async"),
        rounds=2,
        may_download=False,
    )
    told: list[str] = []
    kept: list[ScalingRecord] = []
    found = compare_ways(plan, tell=told.append, keep=kept.append)
    assert [(row.way, row.samples_per_s, row.obstacle) for row in found.rows] == [
        ("single", 50.0, None),
        ("ddp", None, "it failed: rank 1 has no memory left"),
        ("async", 50.0, None),
    ]
    assert [len(one.rows) for one in kept] == [1, 2, 3, 3, 3]
    assert kept[-1] == found
    assert told[2] == "round 1 of 2, 2 of 3: resnet18, torch DDP on cpu,cpu: it failed: rank 1 has no memory left"
