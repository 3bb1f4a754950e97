"""Schedules in a user's loop: the curve of one device on any ranks, also where gradients are accumulated.

The schedules have the shapes of transformers (a LambdaLR), timm (`step_update(n)`) and nanoGPT (a function).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outrider
from outrider.replica.schedule_ticks import BatchesPerStep, ScheduleTicks

SCRIPT = """
import json, math, sys
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
import outrider

policy, folder = sys.argv[1:]
BATCH, SAMPLES, EPOCHS, ACCUMULATED = 4, 256, 3, 2
TOTAL = EPOCHS * SAMPLES // (BATCH * ACCUMULATED)

def with_warmup(step):  # transformers: get_cosine_schedule_with_warmup
    if step < 10:
        return step / 10
    return max(0.0, 0.5 * (1 + math.cos(math.pi * (step - 10) / (TOTAL - 10))))

class CosineUpdates:  # timm: CosineLRScheduler(t_in_epochs=False)
    def __init__(self, optimizer, t_initial, lr_min):
        self.optimizer, self.t_initial, self.lr_min = optimizer, t_initial, lr_min
        self.base = optimizer.param_groups[0]["lr"]

    def step_update(self, num_updates):
        cosine = 1 + math.cos(math.pi * min(num_updates, self.t_initial) / self.t_initial)
        self.optimizer.param_groups[0]["lr"] = self.lr_min + 0.5 * (self.base - self.lr_min) * cosine

def get_lr(iteration):  # nanoGPT
    if iteration < 5:
        return 1e-3 * (iteration + 1) / 6
    ratio = (iteration - 5) / (TOTAL - 5)
    return 1e-5 + 0.5 * (1 + math.cos(math.pi * ratio)) * (1e-3 - 1e-5)

models = [nn.Linear(1, 1) for _ in range(3)]
optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
prepared = LambdaLR(optimizers[0], with_warmup)
by_updates = CosineUpdates(optimizers[1], TOTAL, 1e-5)
curve = []
with outrider.Session(policy=policy, run_dir=folder, anchor=2 if policy == "cadence" else None, outer="none") as s:
    s.prepare(*models, *optimizers, prepared)
    rates = lambda: [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    for epoch in s.epochs(EPOCHS):
        for number, batch in enumerate(s.batches(torch.ones(SAMPLES, 1), batch_size=BATCH)):
            s.backward(sum(model(batch).square().mean() for model in models) / ACCUMULATED)
            if (number + 1) % ACCUMULATED:
                continue
            by_updates.step_update(s.global_step)
            optimizers[2].param_groups[0]["lr"] = get_lr(s.global_step)
            for optimizer in optimizers:
                s.optimizer_step(optimizer)
            curve.append([s.global_step, *rates()])
    told = {"curve": curve, "steps": s.global_step, "seen": s.samples_seen, "total": TOTAL}
    open(f"{folder}/curve{s.rank}.json", "w").write(json.dumps(told))
"""


def curves(folder: Path, policy: str, devices: str) -> list[dict[str, Any]]:
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "OUTRIDER_DEVICES": devices, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), policy, str(folder / "run")]
    subprocess.run(command, env=environment, cwd=folder, check=True, timeout=300)
    return [json.loads(path.read_text()) for path in sorted((folder / "run").glob("curve*.json"))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (told,) = curves(tmp_path_factory.mktemp("alone") / "one", "cadence", "cpu")
    return told


def test_a_schedule_ticks_once_per_step_where_gradients_are_accumulated(alone: dict[str, Any]) -> None:
    assert [entry[0] for entry in alone["curve"]] == list(range(alone["total"]))
    assert alone["steps"] == alone["total"] == 96
    first, last = alone["curve"][0], alone["curve"][-1]
    assert first[1:] == pytest.approx([0.0, 1e-3, 1e-3 / 6])
    # Of a cosine the last step but one of the end: small, and not 0 for a third of the run.
    assert all(0 < rate < 2.5e-5 for rate in last[1:])
    assert alone["curve"][64][1] > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_the_curves_are_those_of_one_device_on_two_unequal_ones(
    tmp_path: Path, policy: str, alone: dict[str, Any]
) -> None:
    rates_at = {step: rates for step, *rates in alone["curve"]}
    together = curves(tmp_path / "two", policy, "cpu,cpu@0.5")
    assert len(together) == 2
    for rank in together:
        steps = [entry[0] for entry in rank["curve"]]
        assert steps == sorted(steps)
        assert len(steps) < 96
        assert steps[-1] > 80
        for step, *rates in rank["curve"]:
            assert rates == pytest.approx(rates_at[step])
        assert (rank["seen"], rank["steps"]) == (alone["seen"], 96)


def rates_of(folder: Path, per: Any, **options: Any) -> list[float]:
    """The rates of each step; 2 epochs of 4 batches, two batches to a step."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda tick: 1 / (1 + tick))
    rates = []
    with outrider.Session(devices="cpu", run_dir=folder, **options) as s:
        s.prepare(model, optimizer, schedule, per=per)
        for _ in s.epochs(2):
            for number, batch in enumerate(s.batches(torch.zeros(16, 1), batch_size=4), start=1):
                s.backward(model(batch).mean())
                if number % 2 == 0:
                    s.optimizer_step()
                    rates.append(optimizer.param_groups[0]["lr"])
    return [round(1 / rate) - 1 for rate in rates]


def test_a_schedule_ticks_as_its_user_asked(tmp_path: Path) -> None:
    assert rates_of(tmp_path / "steps", "optimizer-step") == [0, 1, 2, 3]
    assert rates_of(tmp_path / "batches", "sample-batch") == [1, 3, 5, 7]
    assert rates_of(tmp_path / "epochs", "epoch") == [0, 0, 1, 1]
    with pytest.raises(outrider.ConfigError, match="per must be one of optimizer-step, sample-batch, epoch, got 'day'"):
        rates_of(tmp_path / "days", "day")


def rates_told(model: nn.Module, make_batches: Any, epochs: Any, *, step: Any, end_epoch: Any) -> list[Any]:
    """What a user can print of a schedule per epoch: before, during and after the batches, and after the loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)
    told: list[Any] = []

    def tell() -> None:
        told.append((optimizer.param_groups[0]["lr"], schedule.get_last_lr(), schedule.last_epoch))

    for _ in epochs(model, optimizer, schedule):
        tell()
        for batch in make_batches():
            tell()
            step(model(batch).square().mean(), optimizer)
            tell()
        tell()
        end_epoch(schedule)
    tell()
    return told


def plain_step(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def linear() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(1, 1)


def rates_of_a_plain_loop(model: nn.Module, num_epochs: int) -> list[Any]:
    """As PyTorch documents it: `scheduler.step()` at the end of each epoch."""
    return rates_told(
        model,
        lambda: torch.ones(16, 1).split(4),
        lambda *prepared: range(num_epochs),
        step=plain_step,
        end_epoch=lambda schedule: schedule.step(),
    )


def rates_of_a_session(model: nn.Module, folder: Path, num_epochs: int, **options: Any) -> list[Any]:
    with outrider.Session(devices="cpu", run_dir=folder, **options) as s:

        def epochs(*prepared: Any) -> Any:
            s.prepare(*prepared, per="epoch")
            return s.epochs(num_epochs)

        return rates_told(
            model,
            lambda: s.batches(torch.ones(16, 1), batch_size=4),
            epochs,
            step=lambda loss, optimizer: s.step(loss),
            end_epoch=lambda schedule: None,
        )


def test_a_schedule_per_epoch_shows_the_rates_of_a_plain_loop(tmp_path: Path, one_thread: None) -> None:
    plain, ours = linear(), linear()
    assert rates_of_a_session(ours, tmp_path, 5) == rates_of_a_plain_loop(plain, 5)
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), ours.parameters(), strict=True))
    record = json.loads((tmp_path / "record.json").read_text())
    assert [epoch["learning_rate"] for epoch in record["epochs"]] == [1.0, 0.5, 0.5, 0.25, 0.25]


def test_a_resumed_schedule_per_epoch_shows_the_rates_of_a_plain_loop(tmp_path: Path, one_thread: None) -> None:
    rates_of_a_session(linear(), tmp_path / "first", 3, checkpoint_every=1)
    ours = linear()
    told = rates_of_a_session(ours, tmp_path / "second", 5, resume=tmp_path / "first")
    plain = linear()
    expected = rates_of_a_plain_loop(plain, 5)
    assert told == expected[-len(told) :]
    assert len(told) == 21
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), ours.parameters(), strict=True))


def falling_rate() -> tuple[nn.Module, torch.optim.SGD, torch.optim.lr_scheduler.LambdaLR]:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda tick: 1 / (1 + tick))
    return model, optimizer, schedule


def test_a_schedule_per_epoch_ticks_with_each_pass_where_passes_are_epochs(tmp_path: Path) -> None:
    model, optimizer, schedule = falling_rate()
    told = []
    with outrider.Session(devices="cpu", run_dir=tmp_path) as s:
        s.prepare(model, optimizer, schedule, per="epoch")
        for _ in range(3):
            for batch in s.batches(torch.ones(8, 1), batch_size=4):
                told.append(schedule.last_epoch)
                s.step(model(batch).mean())
    assert told == [0, 0, 1, 1, 2, 2]
    assert schedule.last_epoch == 3


def test_a_schedule_per_epoch_goes_on_in_a_second_loop_over_epochs(tmp_path: Path) -> None:
    """As in fine-tuning that trains the head first."""
    model, optimizer, schedule = falling_rate()
    told = []
    with outrider.Session(devices="cpu", run_dir=tmp_path) as s:
        s.prepare(model, optimizer, schedule, per="epoch")
        for count in (2, 3):
            for _ in s.epochs(count):
                for batch in s.batches(torch.ones(8, 1), batch_size=8):
                    told.append(schedule.last_epoch)
                    s.step(model(batch).mean())
    assert told == [0, 1, 2, 3, 4]
    assert schedule.last_epoch == 5


def test_a_pass_without_a_step_is_no_epoch_of_a_schedule(tmp_path: Path) -> None:
    """As to warm up the statistics of a BatchNorm."""
    model, optimizer, schedule = falling_rate()
    told = []
    with outrider.Session(devices="cpu", run_dir=tmp_path, quiet=True) as s:
        s.prepare(model, optimizer, schedule, per="epoch")
        for batch in s.batches(torch.ones(8, 1), batch_size=8):
            model(batch)
        for _ in s.epochs(2):
            for batch in s.batches(torch.ones(8, 1), batch_size=8):
                s.step(model(batch).mean())
                told.append(schedule.last_epoch)
    assert told == [0, 1]


def test_a_checkpoint_keeps_the_number_of_batches_per_step(tmp_path: Path) -> None:
    assert rates_of(tmp_path, "optimizer-step", checkpoint_every=1) == [0, 1, 2, 3]
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda tick: 1 / (1 + tick))
    with outrider.Session(devices="cpu", run_dir=tmp_path / "on", resume=tmp_path) as s:
        s.prepare(model, optimizer, schedule)
        assert s.global_step == 4


def test_a_schedule_with_step_update_is_told_the_way(tmp_path: Path) -> None:
    class Updated:
        def step_update(self, num_updates: int) -> None: ...

    with outrider.Session(devices="cpu", run_dir=tmp_path) as s, pytest.raises(outrider.ConfigError) as caught:
        s.prepare(Updated())
    assert "hint: leave it out and call scheduler.step_update(s.global_step) before each step" in str(caught.value)


def numbers_seen(*passes: list[int]) -> list[int | None]:
    """The number after each step; each pass is the batches before each of its steps, the last those after them."""
    counted, told = BatchesPerStep(), []
    for *steps, rest in passes:
        counted.open_pass()
        for number in steps:
            for _ in range(number):
                counted.saw_batch()
            counted.saw_step()
            told.append(counted.seen)
        for _ in range(rest):
            counted.saw_batch()
    return told


def test_batches_per_step_are_seen_through_the_ends_of_passes() -> None:
    assert numbers_seen([4, 4, 2], [4, 4, 2]) == [4] * 4, "counted anew in each pass"
    assert numbers_seen([4, 4, 2], [2, 4, 4, 0]) == [4] * 5, "counted on over passes"
    assert numbers_seen([4, 4, 2, 0], [4, 4, 2, 0]) == [4] * 6, "a last step with the rest"
    assert numbers_seen([1, 1, 1, 0], [2, 2, 2, 0]) == [1, 1, 1, 1, 2, 2], "a new habit"


def test_a_pass_without_a_step_does_not_lengthen_the_first_one() -> None:
    ticks = ScheduleTicks()
    for since, batches in ((0, 1), (4, 2)):
        ticks.open_pass(4, since=since)
        ticks.per_step.open_pass()
        for _ in range(batches):
            ticks.saw_batch()
    ticks.saw_step(8)
    assert ticks.per_step.seen == 2
    assert ticks.due(32) == 32 // 8
