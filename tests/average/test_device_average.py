"""Averages on CUDA: over NCCL on the device, and over Gloo through pinned memory; two ranks on one GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from outrider.average.arena import Arena

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# Two ranks on one GPU: NCCL takes them for two hosts that talk over loopback.
NCCL = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("cuda")
    script = Path(__file__).with_name("cuda_rank.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(folder)],
            env=os.environ | NCCL | {"NCCL_HOSTID": f"outrider-{rank}"},
        )
        for rank in range(2)
    ]
    try:
        assert [rank.wait(240) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("world", ["nccl", "nccl_outer", "gloo", "mixed", "nccl_int8", "mixed_bf16"])
def test_ranks_are_identical_after_verified_averages(found: list[dict[str, Any]], world: str) -> None:
    assert found[0][world]["values"] == found[1][world]["values"]
    assert found[0][world]["drifts"] == found[1][world]["drifts"]
    assert found[0][world]["has_timings"]


def test_both_backends_give_the_same_mean(found: list[dict[str, Any]]) -> None:
    on_device, on_host = (torch.tensor(found[0][world]["values"]) for world in ("nccl", "gloo"))
    torch.testing.assert_close(on_device, on_host, rtol=1e-2, atol=1e-4)


def test_a_snapshot_that_is_read_too_early_is_caught_on_every_rank(found: list[dict[str, Any]]) -> None:
    expected = "rank 1, window 1: checksum mismatch at stage 'snapshot': arena "
    assert [rank["early_read"].startswith(expected) for rank in found] == [True, True]


def test_steps_go_on_while_an_average_waits_for_another_rank(found: list[dict[str, Any]]) -> None:
    assert [rank["steps_of_the_first"] for rank in found] == [20, 0]


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_gradients_are_weighted_by_samples(found: list[dict[str, Any]], backend: str) -> None:
    # One sample of gradient 1 and three of gradient 2; the bias has gradient 1 everywhere.
    expected = [1.75, 1.75, 1.0]
    assert [rank["gradients"][backend] for rank in found] == [expected, expected]


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_optimizer_state_is_averaged(found: list[dict[str, Any]], backend: str) -> None:
    # Gradients 1 and 2: first moments 0.1 and 0.2, second moments 0.001 and 0.004.
    assert found[0]["optimizer"][backend] == pytest.approx([0.15, 0.0025])
    assert found[1]["optimizer"][backend] == found[0]["optimizer"][backend]


def test_cudnn_takes_recurrent_weights_from_the_arena_as_they_are() -> None:
    model = nn.Sequential(nn.Embedding(65, 128), nn.LSTM(128, 256, num_layers=2)).cuda()
    arena = Arena(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.zeros(4, 2, dtype=torch.int64, device="cuda"))[0].sum().backward()
    assert model[1].weight_ih_l0.data_ptr() == arena.flats[torch.float32].data_ptr()
