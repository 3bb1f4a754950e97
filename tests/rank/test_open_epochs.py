"""Real runs whose epochs nobody looks at: windows go on from one to the next, nothing is lost, the lab repeats them."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import outrider
from outrider.data.order import with_rest
from outrider.policy.effects import (
    AverageReport,
    AwaitOthers,
    Begin,
    Collect,
    Decision,
    EndSegment,
    GiveBack,
    Lease,
    LeaveOpen,
    OpenWindow,
    Policy,
    Step,
    Take,
)
from outrider.policy.policies.auto import auto
from outrider.policy.policy_spec import PolicySpec, SegmentContext
from outrider.policy.remaining import Remaining
from outrider.record import checkpoint_files
from outrider.replica.recipe import Recipe
from outrider.virtual.lab import Bench
from outrider.virtual.lab import train as train_in_lab

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE, BATCH, SEED, EPOCHS = 331, 8, 3, 4
ONCE_PER_EPOCH = {epoch: Counter(range(SIZE)) for epoch in range(EPOCHS)}
RUNS: dict[str, dict[str, Any]] = {
    "async": {"policy": "async", "anchor": 2, "devices": "cpu,cpu@0.6,cpu@0.3"},
    "async with outer step": {
        "policy": "async",
        "anchor": 3,
        "devices": "cpu,cpu@0.4",
        "outer": "nesterov",
        "average_optimizer": True,
    },
    "cadence": {"policy": "cadence", "anchor": 3, "devices": "cpu,cpu@0.6,cpu@0.3", "shares": [0.5, 0.3, 0.2]},
    "long windows of cadence": {
        "policy": "cadence",
        "anchor": 30,
        "devices": "cpu,cpu@0.5",
        "shares": [0.6, 0.4],
        "outer": "nesterov",
    },
}


def data() -> TensorDataset:
    inputs = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def step(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def accuracy(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


def train(folder: Path, *, step: Any = step, **options: Any) -> outrider.Run:
    settings = {"batch_size": BATCH, "epochs": EPOCHS, "seed": SEED, "threads_per_rank": 1, "quiet": True, **options}
    return outrider.train(
        make_model, make_optimizer, step, data(), run_dir=folder, verify=True, record_schedule=True, **settings
    )


def schedule(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "schedule.json").read_text())
    return document


def stays_open(folder: Path) -> list[bool]:
    """Of each segment; all ranks do, or none."""
    ends = [{any(e[0] == "leave open" for e in rank) for rank in ranks} for ranks in schedule(folder)["segments"]]
    assert all(len(end) == 1 for end in ends)
    return [end.pop() for end in ends]


def uses(folder: Path) -> dict[int, Counter[int]]:
    """How often each place in an epoch's order was used, also after segments that ended early."""
    document, used, remaining = schedule(folder), dict[int, Counter[int]](), Remaining.whole(SIZE)
    places = torch.arange(SIZE)
    for (epoch, *_), ranks in zip(document["marks"], document["segments"], strict=True):
        if epoch not in used:
            used[epoch], remaining = Counter(), Remaining.whole(SIZE)
        order = with_rest(places, remaining).tolist()
        for rank in ranks:
            used[epoch].update(order[p] for e in rank if e[0] == "step" for p in range(e[1], e[1] + e[2]))
        remaining = remaining.after([Lease(*piece) for piece in ranks[0][-1][1]])
    return used


@pytest.fixture(scope="module", params=RUNS)
def through(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("through") / "run"
    train(folder, **RUNS[request.param]).join()
    return request.param, folder


def test_no_epoch_but_the_last_ends_with_an_average(through: tuple[str, Path]) -> None:
    name, folder = through
    # A window of cadence may happen to end with its epoch.
    assert stays_open(folder) == [True] * (EPOCHS - 1) + [False] or "cadence" in name
    assert any(stays_open(folder))
    assert not stays_open(folder)[-1]


def test_every_sample_is_used_once_per_epoch(through: tuple[str, Path]) -> None:
    assert uses(through[1]) == ONCE_PER_EPOCH


def test_every_epoch_has_its_own_metrics(through: tuple[str, Path]) -> None:
    epochs = json.loads((through[1] / "record.json").read_text())["epochs"]
    assert [epoch["samples"] for epoch in epochs] == [SIZE] * EPOCHS
    assert all(epoch["loss"] > 0 and epoch["is_complete"] for epoch in epochs)
    assert sum(epoch["averages"] for epoch in epochs) > 1


def slow_on_rank_1(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    time.sleep(0.02 if os.environ["RANK"] == "1" else 0.001)
    return step(model, batch)


def test_whoever_is_done_first_tells_that_it_waited(tmp_path: Path) -> None:
    # Each rank has half of the batches, and no epoch is long enough for a window.
    setting = {"policy": "cadence", "devices": "cpu,cpu", "shares": [0.5, 0.5], "anchor": 60, "epochs": 2}
    epochs = train(tmp_path / "run", step=slow_on_rank_1, **setting).join().epochs
    assert epochs[0].wait_fraction > 0.1


def test_the_lab_repeats_the_run_bit_for_bit(through: tuple[str, Path]) -> None:
    name, folder = through
    setting = RUNS[name]
    recipe = Recipe(
        model=make_model,
        optimizer=make_optimizer,
        step=step,
        dataset=data(),
        batch_size=BATCH,
        epochs=EPOCHS,
        seed=SEED,
        policy=setting["policy"],
        **({"outer": outrider.Outer(kind="nesterov")} if "outer" in setting else {}),
        average_optimizer=setting.get("average_optimizer", False),
    )
    ranks = len(setting["devices"].split(","))
    again = train_in_lab(recipe, Bench(speeds=(1.0,) * ranks), schedule=schedule(folder)["segments"]).state_dict()
    trained = load_file(folder / "model.safetensors")
    assert {name: torch.equal(tensor, again[name]) for name, tensor in trained.items()} == dict.fromkeys(trained, True)


def test_a_replay_finds_no_departure(through: tuple[str, Path]) -> None:
    name, folder = through
    changes = {key: value for key, value in RUNS[name].items() if key != "devices"}
    result = outrider.replay(
        folder, make_model, make_optimizer, step, data(), batch_size=BATCH, epochs=EPOCHS, seed=SEED, **changes
    )
    assert result.departure is None
    # Where windows stay open at the end of an epoch, no bits are recorded; the last epoch ends with an average.
    assert {epoch.has_same_bits for epoch in result.epochs} <= {True, None}
    assert result.epochs[-1].has_same_bits


@pytest.mark.parametrize("policy", ["async", "cadence"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"evaluate": accuracy, "eval_dataset": data()}, [False] * EPOCHS),
        ({"epoch_end": lambda context: None}, [False] * EPOCHS),
        ({"epoch_start": lambda context: None}, [False] * EPOCHS),
        ({"checkpoint_every": 2}, [True, False, True, False]),
    ],
    ids=["evaluation", "epoch_end", "epoch_start", "checkpoint"],
)
def test_where_somebody_looks_at_the_model_an_average_comes_first(
    policy: str, options: dict[str, Any], expected: list[bool], tmp_path: Path
) -> None:
    train(tmp_path / "run", policy=policy, devices="cpu,cpu", shares=[0.5, 0.5], anchor=6, **options).join()
    assert stays_open(tmp_path / "run") == expected


@pytest.mark.parametrize("policy", ["async", "cadence"])
def test_a_wish_to_stop_and_a_checkpoint_by_time_do_not_wait_for_the_end_of_a_long_window(
    policy: str, tmp_path: Path
) -> None:
    # A window of a thousand batches of each rank is longer than the run.
    setting = {"policy": policy, "devices": "cpu,cpu", "anchor": 1000, "epochs": 60, "checkpoint_every": "0.01s"}
    run = train(tmp_path / "run", step=slow_on_rank_1, **setting)
    epochs = []
    for epoch in run:
        epochs.append(epoch)
        if len(epochs) == 4:
            run.stop()
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["status"] == "stopped"
    # The wish is told to all ranks with the accounts of an epoch; the next one ends with an average.
    assert len(epochs) < 12
    assert sum(epoch.averages for epoch in epochs) > 1
    assert checkpoint_files.find(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["async", "cadence"])
def test_checkpoints_by_time_lose_nothing_and_can_be_resumed(policy: str, tmp_path: Path) -> None:
    setting = {"policy": policy, "devices": "cpu,cpu@0.5", "anchor": 2, "checkpoint_every": "0.02s", "keep": 100}
    train(tmp_path / "run", **setting).join()
    assert uses(tmp_path / "run") == ONCE_PER_EPOCH
    paths = checkpoint_files.find(tmp_path / "run")
    assert len(paths) > 2
    train(tmp_path / "again", resume=paths[len(paths) // 2], **setting).join()
    epochs = json.loads((tmp_path / "again" / "record.json").read_text())["epochs"]
    assert [(epoch["epoch"], epoch["samples"]) for epoch in epochs] == [(n, SIZE) for n in range(EPOCHS)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["async", "cadence"])
def test_a_run_that_is_stopped_goes_on_where_it_was(policy: str, tmp_path: Path) -> None:
    setting = {"policy": policy, "devices": "cpu,cpu@0.5", "anchor": 2, "epochs": 40}
    run = train(tmp_path / "run", **setting)
    next(iter(run))
    run.stop()
    run.join()
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["status"] == "stopped"
    first = uses(tmp_path / "run")
    assert 0 < len(first) < 40
    train(tmp_path / "again", resume=tmp_path / "run", **setting).join()
    epochs = json.loads((tmp_path / "again" / "record.json").read_text())["epochs"]
    assert [(epoch["epoch"], epoch["samples"]) for epoch in epochs] == [(n, SIZE) for n in range(40)]


# Policies of tests: what the policies of Outrider do only in rare moments


@dataclass
class GoesLocal:
    """A chooser that takes local steps after the first epoch, whatever was measured."""

    is_exact: bool = True
    changed_at: int = 0
    fastest: int = 0

    def learn_exact(self, report: AverageReport, splitter: object, left: int | None) -> list[Decision]:
        if not self.is_exact or left != SIZE * (EPOCHS - 1):
            return []
        self.is_exact, self.changed_at = False, report.window
        return [Decision("policy", "local", "the first epoch is over")]

    def learn_local(self, report: AverageReport, planner: object) -> list[Decision]:
        return []


CHOOSER = GoesLocal()


def auto_that_goes_local(segment: SegmentContext) -> Policy:
    return auto(replace(segment, chooser=CHOOSER))  # type: ignore[arg-type]


def test_a_rank_without_planned_batches_takes_part_when_auto_goes_local(tmp_path: Path) -> None:
    """By its share the last rank gets no batch of an epoch; it must learn of the end of each all the same."""
    policy = PolicySpec(
        name="scripted", open=auto_that_goes_local, shares_steps=True, batch_is_global=True, switches=True
    )
    setting = {"devices": "cpu,cpu,cpu", "shares": [0.9, 0.09, 0.01], "max_overshoot": 0, "anchor": 1}
    run = train(tmp_path / "run", policy=policy, batch_size=40, timeout_s=30, **setting)
    assert [epoch.samples for epoch in run.join().epochs] == [SIZE] * EPOCHS
    assert any(stays_open(tmp_path / "run"))


LEASED = 24


def one_rank_leases_nothing(segment: SegmentContext) -> Policy:
    """In the second epoch rank 0 only takes part in averages, and the epoch ends early."""
    if segment.window is not None:
        mine = 0
        if segment.seat.rank:
            lease: Lease = yield Take(LEASED, share=0.5)
            batch, *others = lease.batches(BATCH)
            yield Step(batch, at=batch.start)
            mine = batch.count
            yield Collect()
            if others:
                yield GiveBack(Lease(others[0].start, lease.stop - others[0].start))
        else:
            yield Collect()
        yield Begin(samples=mine, is_dry=False)
        yield Collect()
        yield EndSegment()
        return
    samples = 0
    while (lease := (yield Take(2 * BATCH, share=0.5))) is not None:
        for batch in lease.batches(BATCH):
            yield Step(batch, at=batch.start)
            samples += batch.count
    yield Begin(samples=samples, is_dry=False)
    if not segment.may_stay_open:
        yield Collect()
        return
    while (yield AwaitOthers()) is None:
        pass
    yield LeaveOpen(OpenWindow(samples=0, flying=samples, unaccounted=segment.span.count))


def test_all_ranks_agree_what_is_left_where_one_of_them_leased_nothing(tmp_path: Path) -> None:
    policy = PolicySpec(name="scripted", open=one_rank_leases_nothing)
    train(tmp_path / "run", policy=policy, devices="cpu,cpu,cpu", epochs=3, timeout_s=30).join()
    left = [[rank[-1][1] for rank in ranks] for ranks in schedule(tmp_path / "run")["segments"]]
    assert all(ranks == [ranks[0]] * 3 for ranks in left)
    assert uses(tmp_path / "run") == {epoch: Counter(range(SIZE)) for epoch in range(3)}


class LateTeacher(nn.Module):
    """A frozen tensor that the model itself begins to change after some batches, as after a warm-up."""

    def __init__(self) -> None:
        super().__init__()
        self.student = make_model()
        self.teacher = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.batches = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.batches += self.training
        # Tensors are looked at after steps 32 and 64 of a rank, which has about 62, 47 of them before the last epoch.
        if self.batches > 34:
            self.teacher.data.fill_(1.0 + int(os.environ["RANK"]))
        logits: torch.Tensor = self.student(inputs)
        return logits


@pytest.mark.parametrize("policy", ["async", "cadence"])
def test_a_tensor_that_begins_to_change_late_joins_at_the_next_epoch(policy: str, tmp_path: Path) -> None:
    setting = {"policy": policy, "devices": "cpu,cpu", "shares": [0.5, 0.5], "anchor": 7, "batch_size": 11, "epochs": 4}
    run = outrider.train(
        LateTeacher, make_optimizer, step, data(), run_dir=tmp_path / "run", threads_per_rank=1, quiet=True, **setting
    )
    run.join()
    assert "teacher" in (tmp_path / "run" / "timeline.csv").read_text()
