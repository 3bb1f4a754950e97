"""NCCL between two slices of one GPU: what its ranks are told, and communicators that are ended and made anew."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.average.transport.collective import GroupCollective
from outrider.errors import WaitError
from outrider.launch.launcher import launch
from outrider.machine.devices import parse_devices
from outrider.slices import slice_check
from outrider.world.messages import Link
from outrider.world.world import World


def tell_about_nccl(link: Link) -> None:
    with World.join(link, timeout_s=60) as world:
        first = GroupCollective(world.group_for("nccl"))
        wait = wait_in_vain(first) if world.rank == 0 else None
        world.barrier("the end of a wait in vain")
        has_ended = world.abort_nccl()
        second = GroupCollective(world.group_for("nccl"))
        link.send(
            "nccl",
            wait=wait,
            has_ended=has_ended,
            sum_afterwards=summed(second, world.rank),
            host=os.environ.get("NCCL_HOSTID"),
            is_served=slice_check._attribute(slice_check._MPS_ENABLED, 0),
        )


def wait_in_vain(collective: GroupCollective) -> str:
    """Sum with a rank that does not come."""
    collective.sum_([torch.ones(1_000, device="cuda")])
    try:
        collective.finish(timeout_s=0.5)
    except WaitError as error:
        return error.message
    return "did not wait"


def summed(collective: GroupCollective, rank: int) -> float:
    values = torch.full((1_000,), float(rank + 1), device="cuda")
    collective.sum_([values])
    collective.finish(timeout_s=30)
    return float(values.double().mean())


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    log_dir: Path = tmp_path_factory.mktemp("nccl")
    with launch(tell_about_nccl, {}, devices=parse_devices("cuda:0%70,cuda:0%12"), log_dir=log_dir) as ranks:
        messages = sorted(ranks.messages(), key=lambda message: message.rank)
        ranks.raise_error()
    return [message.fields for message in messages]


def test_a_sum_that_nobody_joins_ends_with_what_was_waited_for(told: list[dict[str, Any]]) -> None:
    assert told[0]["wait"] == "rank 0 waited 0.5 s for parameters to be summed by all 2 ranks"


def test_communicators_that_hang_are_ended_and_made_anew(told: list[dict[str, Any]]) -> None:
    assert [rank["has_ended"] for rank in told] == [True, True]
    assert [rank["sum_afterwards"] for rank in told] == [3.0, 3.0]


def test_the_driver_says_that_a_daemon_serves_every_slice(told: list[dict[str, Any]]) -> None:
    assert [rank["is_served"] for rank in told] == [1, 1]
