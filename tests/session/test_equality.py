"""Sessions against plain loops, the lab and each other: the same numbers whoever owns the loop."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import outrider
from outrider.data.order import shuffled
from outrider.replica.recipe import Recipe
from outrider.virtual.lab import Bench
from outrider.virtual.lab import train as train_in_lab

pytestmark = pytest.mark.usefixtures("one_thread")

SCRIPT = runpy.run_path(str(Path(__file__).with_name("user_script.py")))
BATCH, SEED, SIZE = SCRIPT["BATCH"], SCRIPT["SEED"], SCRIPT["SIZE"]
data, loss_of, make_model, make_optimizer = (
    SCRIPT[name] for name in ("data", "loss_of", "make_model", "make_optimizer")
)


def lab_on_schedule_of(ended: Any, policy: str, **changes: Any) -> dict[str, torch.Tensor]:
    segments = json.loads((ended.folder / "run" / "schedule.json").read_text())["segments"]
    recipe = Recipe(
        model=make_model,
        optimizer=make_optimizer,
        step=loss_of,
        dataset=data(),
        batch_size=BATCH,
        epochs=2,
        seed=SEED,
        policy=policy,
        **changes,
    )
    return train_in_lab(recipe, Bench(speeds=(1.0, 1.0)), schedule=segments).state_dict()


def test_one_rank_is_a_plain_loop_to_the_bit(tmp_path: Path) -> None:
    model, plain = make_model(), make_model()
    optimizer, plain_optimizer = (make_optimizer(m.parameters()) for m in (model, plain))
    with outrider.Session(devices="cpu", seed=SEED, run_dir=tmp_path, policy="async") as s:
        s.prepare(model, optimizer)
        for _ in s.epochs(2):
            for batch in s.batches(data(), batch_size=BATCH):
                s.step(loss_of(model, batch))
    inputs, labels = data().tensors
    for epoch in range(2):
        for positions in shuffled(SIZE, seed=SEED, epoch=epoch).split(BATCH):
            plain_optimizer.zero_grad()
            loss_of(plain, (inputs[positions], labels[positions])).backward()
            plain_optimizer.step()
    assert all(torch.equal(mine, its) for mine, its in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("policy", ["cadence", "async", "balanced"])
def test_the_lab_repeats_a_session(on_two_ranks: Any, policy: str) -> None:
    ended = on_two_ranks(f"plain:{policy}")
    assert ended.code == 0, ended.stderr
    expected = lab_on_schedule_of(ended, policy)
    for rank in range(2):
        reached = load_file(ended.folder / f"plain{rank}.safetensors")
        assert all(torch.equal(reached[name], expected[name]) for name in expected)


def test_a_session_is_replayed_by_its_step_as_a_function(on_two_ranks: Any) -> None:
    ended = on_two_ranks("plain:async")
    assert ended.code == 0, ended.stderr
    options = {"batch_size": BATCH, "epochs": 2, "seed": SEED, "policy": "async", "anchor": 2}
    result = outrider.replay(ended.folder / "run", make_model, make_optimizer, loss_of, data(), **options)
    assert result.departure is None
    assert [epoch.has_same_bits for epoch in result.epochs] == [True, True]


def test_a_whole_batch_split_between_ranks_learns_as_on_one(on_two_ranks: Any) -> None:
    ended = on_two_ranks("accumulating:balanced")
    assert ended.code == 0, ended.stderr
    plain = make_model()
    optimizer = make_optimizer(plain.parameters())
    inputs, labels = data().tensors
    for number, positions in enumerate(torch.arange(SIZE).split(BATCH)):
        (loss_of(plain, (inputs[positions], labels[positions])) / 2).backward()
        if number % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    reached = load_file(ended.folder / "accumulating1.safetensors")
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(reached[name], value, rtol=1e-10, atol=1e-12)


def test_two_optimizers_share_their_gradients_each_in_turn(on_two_ranks: Any) -> None:
    ended = on_two_ranks("adversaries:balanced")
    assert ended.code == 0, ended.stderr
    left, right = _adversaries_alone()
    for name, model in (("left", left), ("right", right)):
        for rank in range(2):
            reached = load_file(ended.folder / f"{name}{rank}.safetensors")
            for key, value in model.state_dict().items():
                torch.testing.assert_close(reached[key], value, rtol=1e-10, atol=1e-12)


def _adversaries_alone() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(SEED)
    left, right = nn.Linear(6, 2).double(), nn.Linear(2, 1).double()
    left_optimizer, right_optimizer = (SCRIPT["make_calm_optimizer"](model.parameters()) for model in (left, right))
    inputs, _ = data().tensors
    for positions in torch.arange(SIZE).split(BATCH):
        right_optimizer.zero_grad()
        right(left(inputs[positions]).detach()).square().mean().backward()
        right_optimizer.step()
        left_optimizer.zero_grad()
        (right(left(inputs[positions])) - 1).square().mean().backward()
        left_optimizer.step()
    return left, right
