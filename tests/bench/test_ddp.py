"""torch's DDP as a peer: its order of samples, its devices, and a real run beside one of ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, TensorDataset

from outrider.api.options import make_order
from outrider.bench.models.image_models import accuracy, cross_entropy_step, logistic
from outrider.bench.modes import parse_mode, run_mode
from outrider.bench.peers.peer_rank import dealt
from outrider.bench.peers.torch_peers import DDP
from outrider.bench.tasks import Task, adam
from outrider.errors import DeviceError
from outrider.machine.devices import parse_devices
from outrider.world.messages import Message

DEVICES = parse_devices("cpu,cpu@0.4")
NUM_SAMPLES = 101


def task() -> Task:
    generator = torch.Generator().manual_seed(0)
    images = TensorDataset(
        torch.rand(NUM_SAMPLES, 784, generator=generator), torch.randint(10, (NUM_SAMPLES,), generator=generator)
    )
    return Task(
        name="logistic",
        data_name="random",
        model=logistic,
        optimizer=adam,
        step=cross_entropy_step,
        dataset=images,
        batch_size=8,
        epochs=2,
        evaluate=accuracy,
        eval_dataset=images,
    )


@given(num_samples=st.integers(5, 200), world_size=st.integers(1, 5))
def test_samples_are_dealt_as_torch_deals_them(num_samples: int, world_size: int) -> None:
    order = torch.arange(num_samples)
    data = TensorDataset(order)
    ours = [dealt(order, rank=rank, world_size=world_size).tolist() for rank in range(world_size)]
    theirs: list[list[int]] = [
        list(DistributedSampler(data, world_size, rank, shuffle=False)) for rank in range(world_size)
    ]
    assert ours == theirs


def test_devices_of_different_kinds_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.bench.peers.peer.cuda_devices", lambda: ("cuda:0",))
    required = {"model": logistic, "optimizer": adam, "step": cross_entropy_step, "dataset": task().dataset}
    order = make_order(required, {"batch_size": 8, "devices": "cuda:0,cpu", "run_dir": tmp_path})
    with pytest.raises(DeviceError) as caught:
        DDP.start(order)
    assert caught.value.message == "torch DDP cannot join devices of different kinds: cuda:0, cpu"
    assert caught.value.hint == "name only CPU ranks or only CUDA devices, or leave the mode ddp out"


def test_a_ddp_run_leaves_the_record_of_any_other_run(tmp_path: Path) -> None:
    told: list[Message] = []
    ddp, solo = parse_mode("ddp", num_devices=2), parse_mode("solo-0", num_devices=2)
    result = run_mode(ddp, task(), devices=DEVICES, run_dir=tmp_path / "ddp", on_message=told.append)
    run_mode(solo, task(), devices=DEVICES, run_dir=tmp_path / "solo")
    ours, theirs = (json.loads((tmp_path / name / "record.json").read_text()) for name in ("solo", "ddp"))
    assert theirs.keys() == ours.keys()
    assert theirs["totals"].keys() == ours["totals"].keys()
    assert theirs["epochs"][0].keys() == ours["epochs"][0].keys()
    assert (theirs["policy"], theirs["status"], theirs["devices"]) == ("ddp", "finished", ["cpu", "cpu@0.4"])
    # 101 samples are padded to 102; 51 per rank make 7 steps of 8.
    assert [(epoch.samples, epoch.averages) for epoch in result.epochs] == [(102, 7), (102, 7)]
    assert result.epochs[0].share_by_rank == (0.5, 0.5)
    assert result.epochs[1].loss < result.epochs[0].loss
    assert {"progress", "epoch"} == {message.kind for message in told}
    assert (tmp_path / "ddp" / "model.safetensors").is_file()
