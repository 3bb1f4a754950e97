"""The peers for real on two CPU ranks, and what is said where one cannot run."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from outrider.api.options import CheckedRun, make_order
from outrider.api.train import start
from outrider.bench.models.image_models import accuracy, cross_entropy_step, logistic
from outrider.bench.peers.peer_rank import dealt
from outrider.bench.peers.peer_table import PEERS, PeerFramework, obstacle
from outrider.bench.peers.torch_peers import num_averages
from outrider.bench.peers.torchft_local_sgd import FROM_SOURCE, HAS_WHEEL
from outrider.bench.tasks import adam
from outrider.errors import ConfigError, DeviceError, StepError
from outrider.machine.devices import parse_devices

CPU_PAIR = parse_devices("cpu,cpu@0.4")
# Uneven on purpose: padded to 202, 101 per rank, 51 steps of 2 in an epoch.
NUM_SAMPLES = 201
BATCH_SIZE = 2
STEPS = 51

needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"
)
needs_torchft = pytest.mark.skipif(
    importlib.util.find_spec("torchft") is None,
    reason="torchft is not installed: it has wheels for Linux on x86_64 only",
)
needs_two_cuda_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def problem(run_dir: Path, *, devices: str = "cpu,cpu@0.4", epochs: int = 2, **changes: Any) -> CheckedRun:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (NUM_SAMPLES,), generator=generator)
    images = torch.rand(NUM_SAMPLES, 784, generator=generator) + torch.nn.functional.one_hot(labels, 784)
    data = TensorDataset(images, labels)
    required = {"model": logistic, "optimizer": adam, "step": cross_entropy_step, "dataset": data}
    options = {
        "batch_size": BATCH_SIZE,
        "epochs": epochs,
        "policy": "sync",
        "devices": devices,
        "run_dir": run_dir,
        "evaluate": accuracy,
        "eval_dataset": data,
        "timeout_s": 60,
    }
    return make_order(required | changes, options)


def record(run_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / "record.json").read_text())
    return content


@pytest.fixture(scope="module")
def our_record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run of one of our own policies leaves."""
    run_dir = tmp_path_factory.mktemp("runs") / "ours"
    with start(problem(run_dir, epochs=1)) as run:
        run.join()
    return record(run_dir)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "averages"),
    [
        # 100 steps of DDP, then the first step and every fourth or twentieth from there; one at the end of an epoch.
        pytest.param("post-local-sgd", [STEPS + 1, 49 + 1 + 1]),
        pytest.param("post-local-sgd-tuned", [STEPS + 1, 49 + 1 + 1]),
        pytest.param("accelerate-local-sgd", [6 + 1, 6 + 1], marks=needs_accelerate),
        # The average at the end of an epoch begins a new period.
        pytest.param("torchft-local-sgd", [25 + 1, 25 + 1], marks=needs_torchft),
        # Periods go on across epochs: 51 steps have 2 of 20, 102 have 5.
        pytest.param("torchft-diloco", [2, 3], marks=needs_torchft),
    ],
)
def test_a_peer_learns_and_leaves_the_record_of_any_other_run(
    name: str, averages: list[int], our_record: dict[str, Any], tmp_path: Path
) -> None:
    with PEERS[name].start(problem(tmp_path)) as run:
        first, second = run.join().epochs
    left = record(tmp_path)
    assert left.keys() == our_record.keys()
    assert left["totals"].keys() == our_record["totals"].keys()
    assert left["epochs"][0].keys() == our_record["epochs"][0].keys()
    assert (left["policy"], left["status"], left["backend"]) == (name, "finished", "cpu")
    assert left["options"]["note"] == PEERS[name].note
    assert [first.averages, second.averages] == averages
    assert [first.samples, second.samples] == [202, 202]
    assert first.share_by_rank == (0.5, 0.5)
    assert second.loss < first.loss
    assert left["totals"]["eval"] > 0.2
    assert (tmp_path / "model.safetensors").is_file()


@needs_two_cuda_devices
def test_data_parallel_learns_on_two_cuda_devices(tmp_path: Path) -> None:
    with PEERS["dp"].start(problem(tmp_path, devices="cuda:0,cuda:1")) as run:
        first, second = run.join().epochs
    # One process took all of it, in batches of two devices.
    assert (first.samples, first.averages, first.share_by_rank) == (201, 51, (1.0,))
    assert second.loss < first.loss


def test_what_fails_in_a_rank_of_a_peer_reaches_the_caller(tmp_path: Path) -> None:
    with PEERS["post-local-sgd"].start(problem(tmp_path, step=failing_step)) as run, pytest.raises(StepError) as caught:
        run.join()
    assert caught.value.message.endswith("ValueError: no such batch")
    assert record(tmp_path)["status"] == "failed"


def failing_step(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    raise ValueError("no such batch")


@given(num_samples=st.integers(5, 200), world_size=st.integers(1, 5))
def test_the_equal_split_covers_every_sample(num_samples: int, world_size: int) -> None:
    order = torch.arange(num_samples)
    parts = [dealt(order, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert {len(part) for part in parts} == {-(-num_samples // world_size)}
    assert set(torch.cat(parts).tolist()) == set(range(num_samples))


@pytest.mark.parametrize(
    ("steps", "period", "averages"),
    [(0, 4, 0), (100, 4, 100), (101, 4, 101), (104, 4, 101), (105, 4, 102), (121, 20, 102)],
)
def test_post_local_sgd_averages_at_every_step_of_its_warm_up_and_periodically_after_it(
    steps: int, period: int, averages: int
) -> None:
    assert num_averages(steps, period=period) == averages


def test_every_peer_is_there_at_its_defaults_and_tuned_where_it_has_something_to_tune() -> None:
    assert list(PEERS) == [
        "ddp",
        "dp",
        "post-local-sgd",
        "post-local-sgd-tuned",
        "accelerate-local-sgd",
        "accelerate-local-sgd-tuned",
        "torchft-local-sgd",
        "torchft-local-sgd-tuned",
        "torchft-diloco",
        "torchft-diloco-tuned",
    ]


@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
def test_every_peer_says_its_setting(peer: PeerFramework) -> None:
    assert len(peer.note) > 30


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    peer = PEERS["accelerate-local-sgd"]
    with pytest.raises(ConfigError) as caught:
        peer.start(problem(tmp_path))
    assert caught.value.message == "accelerate is not installed"
    assert caught.value.hint == "pip install 'outrider[peers]'"
    assert obstacle(peer, CPU_PAIR) == "accelerate is not installed: pip install 'outrider[peers]'"


def test_a_missing_torchft_is_named_with_the_command_for_this_kind_of_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)
    peer = PEERS["torchft-diloco"]
    assert obstacle(peer, CPU_PAIR) == f"torchft is not installed: {peer.install}"
    assert peer.install == ("pip install 'outrider[peers]'" if HAS_WHEEL else FROM_SOURCE)


def test_data_parallel_is_refused_without_two_cuda_devices(tmp_path: Path) -> None:
    with pytest.raises(DeviceError) as caught:
        PEERS["dp"].start(problem(tmp_path))
    assert caught.value.message == "torch DataParallel needs two whole CUDA devices or more, got cpu, cpu@0.4"
    assert caught.value.hint == "name CUDA devices only, or leave the mode dp out"


@pytest.mark.parametrize(
    ("name", "devices", "reason"),
    [
        ("ddp", "cpu,cpu@0.4", None),
        ("dp", "cuda:0,cuda:1", None),
        ("dp", "cuda:0", "torch DataParallel needs two whole CUDA devices or more, got cuda:0"),
        ("dp", "cuda:0%50,cuda:1", "torch DataParallel needs two whole CUDA devices or more, got cuda:0%50, cuda:1"),
        ("post-local-sgd", "cuda:0,cpu", "torch's post-local SGD cannot join devices of different kinds: cuda:0, cpu"),
    ],
)
def test_what_stands_in_the_way_of_a_peer_is_said(name: str, devices: str, reason: str | None) -> None:
    assert obstacle(PEERS[name], parse_devices(devices)) == reason


def test_the_table_imports_neither_accelerate_nor_torchft() -> None:
    program = "import sys, outrider.bench.peers.peer_table; print({'accelerate', 'torchft'} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert answer.stdout == "set()\n"
