"""Real runs of balanced in which one rank comes to work alone: the other rests, and catches up when it is needed."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import outrider
from outrider.record import checkpoint, checkpoint_files
from outrider.replica.recipe import Recipe
from outrider.virtual.lab import Bench, LabRun
from outrider.virtual.lab import train as train_in_lab

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

# Steps enough in an epoch that a rank rests in the middle of one.
SIZE, BATCH, SEED, EPOCHS = 331, 4, 3, 5


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SIZE, 6, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))


def step(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


class SlowAdam(torch.optim.Adam):
    """Its update takes rank 1 so long that sharing steps with it only costs time."""

    def step(self, closure: Any = None) -> Any:
        if os.environ.get("RANK") == "1":
            time.sleep(0.05)
        return super().step(closure)


class FixedAdam(torch.optim.Adam):
    """Nearly all of a step is its update, so that sharing saves nothing; rank 1 takes a tenth longer."""

    def step(self, closure: Any = None) -> Any:
        time.sleep(0.011 if os.environ.get("RANK") == "1" else 0.01)
        return super().step(closure)


def make_scheduler(optimizer: torch.optim.Optimizer) -> StepLR:
    return StepLR(optimizer, step_size=40, gamma=0.9)


def run_for_real(folder: Path, **changes: Any) -> Path:
    basics = {"model": make_model, "optimizer": SlowAdam, "scheduler": make_scheduler, "step": step}
    run = outrider.train(
        dataset=data(),
        run_dir=folder,
        policy="balanced",
        batch_size=BATCH,
        seed=SEED,
        threads_per_rank=1,
        **{**basics, "devices": "cpu,cpu", "epochs": EPOCHS, **changes},
    )
    run.join()
    return folder


def segments(folder: Path) -> list[Any]:
    found: list[Any] = json.loads((folder / "schedule.json").read_text())["segments"]
    return found


def replayed_in_lab(folder: Path, **changes: Any) -> LabRun:
    recipe = Recipe(
        model=make_model,
        optimizer=SlowAdam,
        step=step,
        dataset=data(),
        scheduler=make_scheduler,
        batch_size=BATCH,
        epochs=EPOCHS,
        seed=SEED,
        policy="balanced",
        **changes,
    )
    return train_in_lab(recipe, Bench(speeds=(1.0, 1.0)), schedule=segments(folder))


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "timeline.json").read_text())["events"]
    return [event for event in found if event["kind"] == kind]


def is_lab_equal(folder: Path, again: LabRun) -> bool:
    trained, state = load_file(folder / "model.safetensors"), again.state_dict()
    return all(torch.equal(tensor, state[name]) for name, tensor in trained.items())


@pytest.fixture(scope="module")
def resting_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_for_real(tmp_path_factory.mktemp("resting"), record_schedule=True)


def test_balanced_lets_a_rank_rest_that_only_holds_up_the_other(resting_run: Path) -> None:
    assert [event["value"] for event in events(resting_run, "alone")] == [0]
    rests = [event for event in events(resting_run, "wait") if event["cause"] == "rest"]
    assert {event["rank"] for event in rests} == {1}
    spans = [(event["t"] - event["ms"] / 1e3, event["t"]) for event in rests]
    windows = [(event["start"], event["t"]) for event in events(resting_run, "window") if event["rank"] == 1]
    assert max(min(stop, end) - max(start, begin) for start, stop in windows for begin, end in spans) < 0.01
    last = json.loads((resting_run / "record.json").read_text())["epochs"][-1]
    assert (last["samples"], last["share_by_rank"]) == (SIZE, [1.0, 0.0])
    assert last["wait_fraction"] > 0


def test_every_sample_is_used_once(resting_run: Path) -> None:
    used = [
        Counter(p for rank in segment for e in rank if e[0] in ("step", "shared") for p in range(e[1], e[1] + e[2]))
        for segment in segments(resting_run)
    ]
    assert used == [Counter(range(SIZE))] * EPOCHS


def test_the_lab_repeats_it_bit_for_bit(resting_run: Path) -> None:
    assert is_lab_equal(resting_run, replayed_in_lab(resting_run))


def test_nothing_is_handed_over_where_nobody_needs_it_but_at_the_end(resting_run: Path) -> None:
    last_epoch = max(event["t"] for event in events(resting_run, "epoch end"))
    assert [event["t"] > last_epoch for event in events(resting_run, "hand over")] == [True, True]


def accuracy(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> float:
    """Slow on rank 1, so that its help is worth nothing."""
    if os.environ.get("RANK") == "1":
        time.sleep(0.2)
    return (model(batch[0]).argmax(1) == batch[1]).double().mean().item()


@pytest.fixture(scope="module")
def evaluated_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated")
    return run_for_real(folder, record_schedule=True, evaluate=accuracy, eval_dataset=data())


def test_who_lags_takes_no_part_in_an_evaluation_that_is_not_worth_catching_up_for(evaluated_run: Path) -> None:
    ranks_by_epoch = [
        {e["rank"] for e in events(evaluated_run, "evaluation") if e["epoch"] == n} for n in range(EPOCHS)
    ]
    assert ranks_by_epoch[0] == {0, 1}
    assert ranks_by_epoch[-1] == {0}
    caught_up = [event["t"] for event in events(evaluated_run, "hand over")]
    ends = sorted({event["t"] for event in events(evaluated_run, "epoch end") if event["rank"] == 0})
    assert not [at for at in caught_up if ends[-2] < at < ends[-1]]


def test_what_is_evaluated_is_what_was_learned(evaluated_run: Path) -> None:
    again = replayed_in_lab(evaluated_run, evaluate=accuracy, eval_dataset=data())
    told = json.loads((evaluated_run / "record.json").read_text())["epochs"]
    assert [epoch["eval"] for epoch in told] == pytest.approx([point.eval for point in again.points])
    assert is_lab_equal(evaluated_run, again)


def keep_parameters(context: outrider.EpochContext) -> None:
    seen = [parameter.tolist() for parameter in context.model.parameters()]
    rate = context.optimizer.param_groups[0]["lr"]
    Path(os.environ["SEEN"], f"{context.epoch}-{context.rank}").write_text(json.dumps([float(rate), seen]))


@pytest.fixture(scope="module")
def watched_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    seen = tmp_path_factory.mktemp("seen")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEEN", str(seen))
        yield run_for_real(tmp_path_factory.mktemp("watched"), epoch_end=keep_parameters), seen


def test_a_callback_finds_the_same_model_on_every_rank(watched_run: tuple[Path, Path]) -> None:
    folder, seen = watched_run
    assert [event["value"] for event in events(folder, "alone")] == [0]
    told = {path.name: path.read_text() for path in seen.iterdir()}
    assert [told[f"{epoch}-0"] == told[f"{epoch}-1"] for epoch in range(EPOCHS)] == [True] * EPOCHS
    assert len(set(told.values())) == EPOCHS


def test_a_checkpoint_holds_the_same_state_for_every_rank(tmp_path: Path) -> None:
    folder = run_for_real(tmp_path, checkpoint_every=1)
    assert [event["value"] for event in events(folder, "alone")] == [0]
    [path, *_] = checkpoint_files.find(folder)
    working, resting = (checkpoint.load_rank(path, rank) for rank in range(2))
    assert working["steps"] == resting["steps"] == EPOCHS * math.ceil(SIZE / BATCH)
    assert working["ticks"] == resting["ticks"]
    for number, entry in working["optimizer"]["state"].items():
        assert all(torch.equal(value, resting["optimizer"]["state"][number][key]) for key, value in entry.items())


def plain_model() -> nn.Module:
    """Without BatchNorm, whose statistics depend on who has which samples."""
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def exact_step(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return step(model, (batch[0].double(), batch[1]))


def run_that_tries_both_ranks(folder: Path, **options: Any) -> Path:
    """On a busy machine two equal ranks may look too different for a trial of the other: then the run is repeated."""
    for attempt in range(4):
        run = run_for_real(folder / str(attempt), **options)
        if {event["value"] for event in events(run, "alone")} >= {0, 1}:
            return run
    raise AssertionError("only one of two equal ranks was tried alone, in four runs")


def test_of_two_similar_ranks_each_is_tried_alone_and_the_model_is_that_of_one(tmp_path: Path) -> None:
    options = {"model": plain_model, "step": exact_step, "epochs": 12}
    folder = run_that_tries_both_ranks(tmp_path / "two", **options, optimizer=FixedAdam)
    whole = load_file(run_for_real(tmp_path / "one", **options, devices="cpu") / "model.safetensors")
    for name, tensor in load_file(folder / "model.safetensors").items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-8, atol=1e-9)
