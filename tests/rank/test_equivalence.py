"""Real processes against plain torch, the lab and each other: the same numbers whoever drives."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import outrider
from outrider.data.order import shuffled
from outrider.launch.launcher import launch
from outrider.machine.devices import parse_devices
from outrider.replica.recipe import Recipe
from outrider.virtual.lab import Bench
from outrider.virtual.lab import train as train_in_lab
from outrider.world.messages import Link
from outrider.world.world import World

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE, BATCH, SEED = 331, 8, 3
"""A prime, so that nothing divides it."""


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SIZE, 6, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 2))


def make_normed_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))


def make_plain_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))


def make_wide_model() -> nn.Module:
    """Large enough that its gradients are averaged in pieces."""
    return nn.Sequential(nn.Linear(6, 1100), nn.Tanh(), nn.Linear(1100, 1100), nn.Tanh(), nn.Linear(1100, 2))


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def step(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def options(**changes: Any) -> dict[str, Any]:
    return {"batch_size": BATCH, "epochs": 2, "seed": SEED, "threads_per_rank": 1, "policy": "cadence", **changes}


def run_for_real(folder: Path, model: Any, *, optimizer: Any = make_optimizer, **changes: Any) -> Path:
    run = outrider.train(model, optimizer, step, data(), run_dir=folder, **options(**changes))
    run.join()
    return folder


def replayed_in_lab(folder: Path, model: Any, *, ranks: int, **changes: Any) -> dict[str, torch.Tensor]:
    segments = json.loads((folder / "schedule.json").read_text())["segments"]
    basics = {"optimizer": make_optimizer, "batch_size": BATCH, "epochs": 2, "policy": "cadence"}
    recipe = Recipe(model=model, step=step, dataset=data(), seed=SEED, **{**basics, **changes})
    return train_in_lab(recipe, Bench(speeds=(1.0,) * ranks), schedule=segments).state_dict()


def positions_used(folder: Path) -> list[Counter[int]]:
    segments = json.loads((folder / "schedule.json").read_text())["segments"]
    steps = ("step", "shared")
    return [
        Counter(p for rank in segment for e in rank if e[0] in steps for p in range(e[1], e[1] + e[2]))
        for segment in segments
    ]


@pytest.fixture(scope="module")
def async_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("async")
    return run_for_real(
        folder, make_model, policy="async", devices="cpu,cpu@0.4", anchor=2, verify=True, record_schedule=True
    )


CADENCE = {
    "policy": "cadence",
    "devices": "cpu,cpu@0.5",
    "anchor": 3,
    "shares": [0.7, 0.3],
    "outer": "nesterov",
    "average_optimizer": True,
}


@pytest.fixture(scope="module")
def cadence_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cadence")
    return run_for_real(folder, make_normed_model, verify=True, record_schedule=True, **CADENCE)


def test_the_lab_repeats_an_async_run_bit_for_bit(async_run: Path) -> None:
    again = replayed_in_lab(async_run, make_model, ranks=2, policy="async")
    trained = load_file(async_run / "model.safetensors")
    assert {name: torch.equal(tensor, again[name]) for name, tensor in trained.items()} == dict.fromkeys(trained, True)


def test_the_lab_repeats_a_cadence_run_bit_for_bit(cadence_run: Path) -> None:
    again = replayed_in_lab(
        cadence_run,
        make_normed_model,
        ranks=2,
        policy="cadence",
        outer=outrider.Outer(kind="nesterov"),
        average_optimizer=True,
    )
    trained = load_file(cadence_run / "model.safetensors")
    assert {name: torch.equal(tensor, again[name]) for name, tensor in trained.items()} == dict.fromkeys(trained, True)


def test_a_real_async_run_uses_every_sample_once_per_epoch(async_run: Path) -> None:
    assert positions_used(async_run) == [Counter(range(SIZE))] * 2


def test_a_real_cadence_run_uses_every_sample_once_per_epoch(cadence_run: Path) -> None:
    assert positions_used(cadence_run) == [Counter(range(SIZE))] * 2


@pytest.mark.parametrize(("policy", "devices"), [("sync", "cpu,cpu"), ("balanced", "cpu,cpu@0.6,cpu@0.3")])
def test_the_lab_repeats_shared_steps_of_a_large_model_bit_for_bit(policy: str, devices: str, tmp_path: Path) -> None:
    changes = {"policy": policy, "epochs": 1, "max_grad_norm": 0.5}
    run_for_real(tmp_path, make_wide_model, devices=devices, record_schedule=True, **changes)
    again = replayed_in_lab(tmp_path, make_wide_model, ranks=len(devices.split(",")), **changes)
    trained = load_file(tmp_path / "model.safetensors")
    assert positions_used(tmp_path) == [Counter(range(SIZE))]
    assert {name: torch.equal(tensor, again[name]) for name, tensor in trained.items()} == dict.fromkeys(trained, True)


TORCHRUN_SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
import test_equivalence as case
case.run_for_real({run!r}, case.make_normed_model, **case.CADENCE)
"""


def look_at_the_model(context: outrider.EpochContext) -> None:
    """Windows end with the epoch before a callback, as they do in ranks of torchrun."""


@pytest.mark.slow
def test_ranks_of_torchrun_train_the_same_model_bit_for_bit(tmp_path: Path) -> None:
    started = run_for_real(tmp_path / "started", make_normed_model, epoch_end=look_at_the_model, **CADENCE)
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN_SCRIPT.format(folder=str(Path(__file__).parent), run=str(tmp_path / "run")))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, str(script)], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (started, tmp_path / "run"))
    assert {name: torch.equal(tensor, theirs[name]) for name, tensor in ours.items()} == dict.fromkeys(ours, True)


def torch_ddp(link: Link, *, steps: int) -> None:
    with World.join(link) as world:
        parameters = plain_ddp_loop(world, steps=steps)
        # DDP must be gone before its process group, or its destructor may wait forever.
        gc.collect()
        dist.barrier()
        if world.rank == 0:
            link.send("trained", parameters=parameters)


def plain_ddp_loop(world: World, *, steps: int) -> list[list[float]]:
    """What a user of torch would write, on the batches that `sync` takes."""
    torch.manual_seed(SEED)
    model = nn.parallel.DistributedDataParallel(make_plain_model())
    optimizer = make_optimizer(model.parameters())
    inputs, labels = data().tensors
    order = shuffled(SIZE, seed=SEED, epoch=0)
    for number in range(steps):
        start = (number * world.size + world.rank) * BATCH
        mine = order[start : start + BATCH]
        optimizer.zero_grad()
        step(model, (inputs[mine], labels[mine])).backward()
        optimizer.step()
    return [parameter.flatten().tolist() for parameter in model.parameters()]


@pytest.mark.slow
def test_sync_equals_torch_ddp_on_the_same_batches(tmp_path: Path) -> None:
    steps = 20
    devices = parse_devices("cpu,cpu")
    with launch(torch_ddp, {"steps": steps}, devices=devices, log_dir=tmp_path / "ddp", num_threads=1) as ranks:
        messages = list(ranks.messages())
        ranks.raise_error()
    expected = torch.tensor([value for parameter in messages[0].fields["parameters"] for value in parameter])
    inputs, labels = data().tensors
    first = shuffled(SIZE, seed=SEED, epoch=0)[: steps * 2 * BATCH]
    run = outrider.train(
        make_plain_model,
        make_optimizer,
        step,
        TensorDataset(inputs[first], labels[first]),
        run_dir=tmp_path / "sync",
        devices="cpu,cpu",
        **options(epochs=1, shuffle=False, policy="sync"),
    )
    trained = run.join().load_into(make_plain_model())
    ours = torch.cat([parameter.detach().flatten() for parameter in trained.parameters()])
    assert (ours - expected).abs().max() < 1e-6


def test_three_real_ranks_share_a_balanced_batch_of_float64(tmp_path: Path) -> None:
    inputs, labels = data().tensors
    run = outrider.train(
        lambda: make_plain_model().double(),
        partial(torch.optim.SGD, lr=0.1),
        step,
        TensorDataset(inputs.double(), labels),
        run_dir=tmp_path,
        devices="cpu,cpu@0.6,cpu@0.3",
        record_schedule=True,
        **options(epochs=1, batch_size=16, policy="balanced"),
    )
    trained = run.join().load_into(make_plain_model().double())
    torch.manual_seed(SEED)
    plain = make_plain_model().double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for indices in shuffled(SIZE, seed=SEED, epoch=0).split(16):
        optimizer.zero_grad()
        step(plain, (inputs[indices].double(), labels[indices])).backward()
        optimizer.step()
    assert positions_used(tmp_path) == [Counter(range(SIZE))]
    for ours, theirs in zip(trained.parameters(), plain.parameters(), strict=True):
        assert (ours - theirs).abs().max() < 1e-9
