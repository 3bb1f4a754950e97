"""Two ranks of unequal speed in processes of their own; each run happens once and is looked at from many sides."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ports import free_port
from torch import nn

import outrider
from outrider.replica.recipe import Recipe
from outrider.virtual.lab import Bench
from outrider.virtual.lab import train as train_in_lab

Trainer = Callable[..., outrider.Run]
Events = Callable[[Path, str], list[dict[str, Any]]]
ReadJson = Callable[[Path], Any]
RANKS = (0, 1)


def step_that_tells(model: nn.Module, batch: Any) -> Any:
    outrider.log("rank", int(os.environ["RANK"]))
    outrider.log("port", int(os.environ["MASTER_PORT"]))
    outrider.log("threads", torch.get_num_threads())
    return (model(batch[0]) - batch[1]).square().mean()


def tell(context: outrider.EpochContext) -> None:
    print(f"rank {context.rank} ended epoch {context.epoch} at rate {context.optimizer.param_groups[0]['lr']}")


def mean_error(model: nn.Module, batch: Any) -> Any:
    return (model(batch[0]) - batch[1]).abs().mean()


def one_over_ticks(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda tick: 1 / (1 + tick))


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def cadence(
    train_two: Trainer, problem: dict[str, Any], port: int, tmp_path_factory: pytest.TempPathFactory
) -> outrider.Run:
    """A run of policy cadence with a guard that must act; joined."""
    run = train_two(
        step=step_that_tells,
        epochs=3,
        batch_size=2,
        speed_hints=[1.0, 0.5],
        min_anchor=10,
        drift_threshold=1e-12,
        evaluate=mean_error,
        eval_dataset=problem["dataset"],
        scheduler=one_over_ticks,
        epoch_end=tell,
        port=port,
        threads_per_rank=1,
        run_dir=tmp_path_factory.mktemp("cadence"),
    )
    run.join()
    return run


@pytest.fixture(scope="module")
def overlapped(train_two: Trainer, tmp_path_factory: pytest.TempPathFactory) -> outrider.Run:
    """A run of policy async with fixed shares, no guard and every average verified; joined."""
    run = train_two(
        optimizer=adam,
        policy="async",
        epochs=2,
        batch_size=2,
        shares=[0.75, 0.25],
        anchor=2,
        max_batch_diff=3,
        max_overshoot=0,
        guard=False,
        drift_threshold=1e-12,
        verify=True,
        run_dir=tmp_path_factory.mktemp("async"),
    )
    run.join()
    return run


# What all ranks did together


def test_every_sample_is_used_exactly_once_per_epoch(cadence: outrider.Run, overlapped: outrider.Run) -> None:
    assert [epoch.samples for epoch in [*cadence.epochs, *overlapped.epochs]] == [96] * 5


def test_shares_by_rank_sum_to_one(cadence: outrider.Run) -> None:
    assert [sum(epoch.share_by_rank) for epoch in cadence.epochs] == [pytest.approx(1.0)] * 3


def test_logged_scalars_are_averaged_over_ranks_by_samples(cadence: outrider.Run) -> None:
    assert all(epoch.logged["rank"] == pytest.approx(epoch.share_by_rank[1]) for epoch in cadence.epochs)


def test_the_master_port_of_the_ranks_is_the_one_asked_for(cadence: outrider.Run, port: int) -> None:
    assert cadence.epochs[0].logged["port"] == port


def test_each_rank_has_the_threads_asked_for(cadence: outrider.Run) -> None:
    assert cadence.epochs[0].logged["threads"] == 1


def test_the_evaluation_is_of_the_model_that_is_left_behind(cadence: outrider.Run, problem: dict[str, Any]) -> None:
    model = cadence.join().load_into(problem["model"]()).eval()
    with torch.no_grad():
        assert cadence.epochs[-1].eval == pytest.approx(mean_error(model, problem["dataset"]).item(), rel=1e-5)


def test_the_model_learns(cadence: outrider.Run, overlapped: outrider.Run) -> None:
    assert cadence.epochs[-1].loss < cadence.epochs[0].loss
    assert overlapped.epochs[-1].loss < overlapped.epochs[0].loss


def test_joining_twice_gives_the_same(cadence: outrider.Run) -> None:
    assert cadence.join() == cadence.join()


def test_polling_after_the_end_gives_the_epochs_once(overlapped: outrider.Run) -> None:
    assert [[epoch.epoch for epoch in overlapped.poll()] for _ in range(2)] == [[0, 1], []]


@pytest.mark.parametrize("rank", RANKS)
def test_the_schedule_follows_the_samples_of_the_whole_world(cadence: outrider.Run, rank: int) -> None:
    lines = (cadence.run_dir / f"rank{rank}.log").read_text().splitlines()
    ticks = [round(0.1 / float(line.rsplit(" ", 1)[1])) - 1 for line in lines if " ended epoch " in line]
    # One tick per two samples of the world: 48 per epoch, whatever the rank itself took of them.
    assert [tick // 48 for tick in ticks] == [0, 1, 2]


# The timeline


def test_plans_have_their_reasons(cadence: outrider.Run, events: Events) -> None:
    plans = events(cadence.run_dir, "plan")
    assert plans[0]["value"] == [20, 10]
    assert plans[0]["reason"] == "rank 1 sets the pace by speed_hints, rounding wastes 0.0%"


def test_the_guard_acts_and_says_why(cadence: outrider.Run, events: Events) -> None:
    verdict = events(cadence.run_dir, "guard")[0]
    assert verdict["value"] == "rising"
    assert "drift" in verdict["reason"]


def test_what_the_guard_did_to_the_anchor_is_told(cadence: outrider.Run, events: Events) -> None:
    reasons = [change["reason"] for change in events(cadence.run_dir, "anchor")]
    assert any("guard" in reason for reason in reasons)


def test_guard_false_keeps_the_guard_quiet(overlapped: outrider.Run, events: Events) -> None:
    assert events(overlapped.run_dir, "guard") == []


@pytest.mark.parametrize("rank", RANKS)
def test_averages_have_their_cost_and_their_window(cadence: outrider.Run, events: Events, rank: int) -> None:
    averages = [event for event in events(cadence.run_dir, "average end") if event["rank"] == rank]
    assert [average["window"] for average in averages] == list(range(len(averages)))
    assert all(average["ms"] > 0 and average["drift"] >= 0 for average in averages)


@pytest.mark.parametrize("rank", RANKS)
def test_windows_have_their_start_and_what_was_done_in_them(cadence: outrider.Run, events: Events, rank: int) -> None:
    windows = [event for event in events(cadence.run_dir, "window") if event["rank"] == rank]
    # The last plan of an epoch may have nothing left for a rank.
    planned = [number for number, plan in enumerate(events(cadence.run_dir, "plan")) if plan["value"][rank]]
    assert [window["window"] for window in windows] == planned
    assert all(window["start"] < window["t"] for window in windows)
    assert windows[0]["batches"] * 2 == windows[0]["samples"] > 0
    assert windows[0]["compute_ms"] > 0


def test_waits_name_their_cause(cadence: outrider.Run, events: Events) -> None:
    causes = {wait["cause"] for wait in events(cadence.run_dir, "wait")}
    assert {"startup", "average"} <= causes <= {"startup", "epoch boundary", "average", "rest", "data", "evaluation"}


def test_max_batch_diff_bounds_the_lead_of_the_fast_rank(overlapped: outrider.Run, events: Events) -> None:
    assert {tuple(plan["value"]) for plan in events(overlapped.run_dir, "plan")} == {(5, 2)}


def test_without_overshoot_no_rank_goes_beyond_its_plan(overlapped: outrider.Run, events: Events) -> None:
    windows = events(overlapped.run_dir, "window")
    assert max(window["batches"] for window in windows if window["rank"] == 0) == 5
    assert max(window["batches"] for window in windows if window["rank"] == 1) == 2


# What is left behind


@pytest.mark.parametrize(
    "name",
    ["config.json", "record.json", "timeline.json", "timeline.csv", "trace.json", "model.safetensors", "rank1.log"],
)
def test_a_run_leaves_its_files(cadence: outrider.Run, name: str) -> None:
    assert (cadence.run_dir / name).is_file()


def test_the_record_names_devices_and_backend_with_the_reasons_beside_it(
    cadence: outrider.Run, read_json: ReadJson
) -> None:
    record, config = (read_json(cadence.run_dir / name) for name in ("record.json", "config.json"))
    assert record["devices"] == ["cpu", "cpu@0.5"]
    assert record["backend"] == "cpu"
    assert config["reasons"] == {
        "devices": "asked for",
        "backend": "auto: rank 0 is on cpu, and nccl joins CUDA devices only",
    }


def test_the_record_has_the_wait_and_the_cost_of_averages(cadence: outrider.Run, read_json: ReadJson) -> None:
    totals = read_json(cadence.run_dir / "record.json")["totals"]
    assert 0 < totals["exposed_average_fraction"] < 1
    assert 0 <= totals["wait_fraction"] < 1


def test_what_a_rank_prints_is_in_its_log(cadence: outrider.Run) -> None:
    assert "rank 1 ended epoch 2 at rate" in (cadence.run_dir / "rank1.log").read_text()


# The outer step and the average of optimizer state


def test_the_runtime_agrees_with_the_lab_on_outer_step_and_optimizer_state(
    train_two: Trainer, problem: dict[str, Any], tmp_path: Path, read_json: ReadJson
) -> None:
    options: dict[str, Any] = {
        "optimizer": adam,
        "epochs": 2,
        "batch_size": 4,
        "policy": "cadence",
        "outer": outrider.Outer(kind="slowmo", lr=0.9, momentum=0.5),
        "average_optimizer": True,
        "shares": (0.75, 0.25),
        "anchor": 2,
    }
    trained = train_two(**options, record_schedule=True, run_dir=tmp_path).join()
    schedule = read_json(tmp_path / "schedule.json")["segments"]
    lab = train_in_lab(Recipe(**{**problem, **options}), Bench(speeds=(1.0, 0.5)), schedule=schedule).state_dict()
    assert [epoch.share_by_rank for epoch in trained.epochs] == [(0.75, 0.25)] * 2
    assert all(torch.allclose(lab[name], value, rtol=0, atol=1e-6) for name, value in trained.state_dict.items())


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


# Stop, resume, close


RESUMABLE: dict[str, Any] = {
    "optimizer": adam,
    "epochs": 40,
    "batch_size": 4,
    "outer": "nesterov",
    "average_optimizer": True,
    "shares": [0.75, 0.25],
    "anchor": 2,
    "scheduler": one_over_ticks,
}


@pytest.fixture(scope="module")
def whole(train_two: Trainer, tmp_path_factory: pytest.TempPathFactory) -> outrider.Run:
    """A run that is never stopped, with a checkpoint at the end of every epoch; joined."""
    run = train_two(**RESUMABLE, checkpoint_every=1, keep=50, run_dir=tmp_path_factory.mktemp("whole"))
    run.join()
    return run


def is_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, right[name]) for name, value in left.items())


def test_a_run_of_two_ranks_that_was_stopped_and_resumed_equals_the_one_that_was_not(
    train_two: Trainer, whole: outrider.Run, tmp_path: Path
) -> None:
    run = train_two(**RESUMABLE, run_dir=tmp_path / "cut")
    next(iter(run))
    run.stop()
    cut = [epoch for epoch in run.join().epochs if epoch.is_complete]
    resumed = train_two(**RESUMABLE, resume=tmp_path / "cut", run_dir=tmp_path / "resumed").join()
    assert [epoch.samples for epoch in (*cut, *resumed.epochs)] == [96] * 40
    assert is_same(whole.join().state_dict, resumed.state_dict)


def test_a_run_resumed_from_the_end_of_its_first_epoch_equals_the_one_that_went_on(
    train_two: Trainer, whole: outrider.Run, tmp_path: Path
) -> None:
    checkpoint = whole.run_dir / "checkpoints" / "epoch00001-000000000000"
    resumed = train_two(**RESUMABLE, resume=checkpoint, run_dir=tmp_path).join()
    assert [(epoch.loss, epoch.drift) for epoch in resumed.epochs] == [
        (epoch.loss, epoch.drift) for epoch in whole.epochs[1:]
    ]
    assert is_same(whole.join().state_dict, resumed.state_dict)


def test_train_returns_at_once_and_leaving_the_block_ends_the_run(
    train_two: Trainer, tmp_path: Path, read_json: ReadJson
) -> None:
    with train_two(epochs=1_000_000, run_dir=tmp_path) as run:
        assert (run.is_running, run.poll()) == (True, [])
        next(iter(run))
    assert not run.is_running
    with pytest.raises(outrider.OutriderError, match=r"^the run was closed before it was done\n"):
        run.join()
    assert read_json(tmp_path / "record.json")["status"] == "closed"


def test_an_interrupt_ends_the_run_and_the_record_says_so(
    train_two: Trainer, tmp_path: Path, read_json: ReadJson
) -> None:
    run = train_two(devices="cpu", epochs=1_000_000, run_dir=tmp_path)
    next(iter(run))
    with pytest.raises(KeyboardInterrupt):
        interrupt_while(run.join)
    assert not run.is_running
    assert read_json(tmp_path / "record.json")["status"] == "interrupted"


def interrupt_while(wait: Callable[[], object]) -> None:
    """Ctrl-C while this program waits."""
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        wait()
    finally:
        timer.join()


# Errors


def fail_in_rank_1_at_step_3(model: nn.Module, batch: Any) -> Any:
    if os.environ["RANK"] == "1":
        model.num_calls = getattr(model, "num_calls", 0) + 1  # type: ignore[assignment]
        if model.num_calls == 4:
            raise ValueError("no such label")
    return (model(batch[0]) - batch[1]).square().mean()


def test_an_exception_in_one_rank_reaches_the_caller_with_rank_step_and_lines(
    train_two: Trainer, tmp_path: Path, read_json: ReadJson
) -> None:
    run = train_two(step=fail_in_rank_1_at_step_3, policy="sync", epochs=1_000, batch_size=2, run_dir=tmp_path)
    with pytest.raises(outrider.StepError) as caught:
        run.join()
    error = caught.value
    assert (error.rank, error.step) == (1, 3)
    assert error.message == "rank 1 (cpu@0.5), step 3: ValueError: no such label"
    assert error.traceback is not None
    assert "in fail_in_rank_1_at_step_3" in error.traceback
    assert 'raise ValueError("no such label")' in error.traceback
    assert "outrider/replica" not in error.traceback
    assert read_json(tmp_path / "record.json")["status"] == "failed"
