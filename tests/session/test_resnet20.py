"""ResNet-20 as a flow through `setup()`, and by hand through `train()` and in the lab: one schedule, one result."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import outrider
from outrider.replica.recipe import Recipe
from outrider.virtual.lab import Bench
from outrider.virtual.lab import train as train_in_lab

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

SCRIPT = runpy.run_path(str(Path(__file__).with_name("user_script.py")))
WHAT = {
    "model": SCRIPT["make_resnet20"],
    "optimizer": SCRIPT["make_calm_optimizer"],
    "step": SCRIPT["loss_of"],
    "batch_size": 4,
    "seed": SCRIPT["SEED"],
    "policy": "cadence",
}


@pytest.fixture(scope="module")
def flow(on_two_ranks: Any) -> Any:
    ended = on_two_ranks("resnet20_flow:cadence")
    assert ended.code == 0, ended.stderr
    return ended


def schedule_of(folder: Path) -> Any:
    """Without the digests of the models, which depend on the names of their tensors."""
    segments = json.loads((folder / "schedule.json").read_text())["segments"]
    return [[[entry for entry in rank if entry[0] != "ended"] for rank in segment] for segment in segments]


def assert_same(flow: Any, other: dict[str, torch.Tensor]) -> None:
    """The two networks hold their tensors in the same order, under different names."""
    resnet = SCRIPT["_resnet"]()
    reached = load_file(flow.folder / "flow1.safetensors")
    names = zip(resnet["resnet20_flow"]().state_dict(), resnet["PlainResNet20"]().state_dict(), strict=True)
    for ours, theirs in names:
        torch.testing.assert_close(reached[ours], other[theirs], rtol=1e-12, atol=1e-14)


def test_both_ranks_took_part_and_the_weights_moved(flow: Any) -> None:
    (segment,) = schedule_of(flow.folder / "run")
    steps = [sum(entry[0] == "step" for entry in entries) for entries in segment]
    assert steps == [6, 4]
    before = SCRIPT["make_resnet20"]().state_dict()["head.weight"]
    assert not torch.equal(load_file(flow.folder / "flow0.safetensors")["head.weight"], before)


def test_the_plain_network_in_the_lab_ends_where_the_flow_did(flow: Any) -> None:
    recipe = Recipe(**WHAT, dataset=SCRIPT["images"]())
    run = train_in_lab(recipe, Bench(speeds=(1.0, 1.0)), schedule=schedule_of(flow.folder / "run"))
    assert_same(flow, run.state_dict())


def test_the_plain_network_through_train_ends_where_the_flow_did(flow: Any, tmp_path: Path) -> None:
    outrider.train(
        **WHAT,
        **SCRIPT["FIXED_PLAN"],
        dataset=SCRIPT["images"](),
        devices="cpu,cpu",
        threads_per_rank=1,
        record_schedule=True,
        run_dir=tmp_path / "run",
    ).join()
    assert schedule_of(tmp_path / "run") == schedule_of(flow.folder / "run")
    assert_same(flow, load_file(tmp_path / "run" / "model.safetensors"))
