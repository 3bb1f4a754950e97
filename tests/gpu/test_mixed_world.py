"""A CUDA rank beside a CPU rank in one run, over host memory: every policy converges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

POLICIES = ("auto", "sync", "balanced", "cadence", "async")


@pytest.fixture(scope="module")
def runs(train_all: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    both = {"devices": "cuda:0,cpu"}
    # Measured, the CPU is so slow that in runs as short as these it would not be tried.
    hinted = both | {"speed_hints": (1.0, 0.5)}
    wishes = {policy: hinted if policy in ("auto", "balanced") else both for policy in POLICIES}
    return train_all(**{policy: {"policy": policy, **wish} for policy, wish in wishes.items()})


def test_a_short_run_is_left_to_the_gpu(train_all: Callable[..., dict[str, Any]]) -> None:
    run = train_all(auto={"devices": "cuda:0,cpu"})["auto"]
    assert run.error is None
    assert [tuple(epoch.share_by_rank) for epoch in run.epochs] == [(1.0, 0.0)] * 3


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cuda_rank_and_a_cpu_rank_learn_together(runs: dict[str, Any], policy: str) -> None:
    assert runs[policy].error is None
    assert runs[policy].epochs[-1].loss < 0.6 * runs[policy].epochs[0].loss


@pytest.mark.parametrize("policy", POLICIES)
def test_both_take_part_and_every_sample_is_used_once(runs: dict[str, Any], policy: str) -> None:
    assert [epoch.samples for epoch in runs[policy].epochs] == [2_048] * 3
    # In so small a model the quicker of the two may later take every batch of `balanced` alone.
    assert min(runs[policy].epochs[0].share_by_rank) > 0
