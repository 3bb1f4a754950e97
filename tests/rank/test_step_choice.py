"""Which memory format ranks agree on where one is on a slice; what a whole GPU takes is tested with the replica."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.machine.devices import parse_devices
from outrider.rank.step_choice import agree_on_format
from outrider.timeline.recorder import Recorder

WHOLE = {"value": "channels_last", "reason": "convolutions over images on tensor cores"}


def agreed(device: str, *, told_by_others: list[dict[str, Any]], rank: int) -> dict[str, Any]:
    """What the first rank writes to the timeline; nothing is tried on a slice, so this needs no GPU."""

    def exchange(mine: dict[str, Any], *, name: str) -> list[dict[str, Any]]:
        return [*told_by_others[:rank], mine, *told_by_others[rank:]]

    world = SimpleNamespace(rank=0, spec=parse_devices([device])[0], exchange_json=exchange)
    replica = SimpleNamespace(recipe=SimpleNamespace(memory_format="auto"))
    recorder = Recorder(0, origin_s=0.0)
    agree_on_format(replica, None, world=world, devices=[device], recorder=recorder)  # type: ignore[arg-type]
    (event,) = recorder.events
    return event


@pytest.mark.parametrize("told_by_others", [[], [WHOLE]])
def test_a_slice_keeps_the_models_own_format(told_by_others: list[dict[str, Any]]) -> None:
    event = agreed("cuda:0%16", told_by_others=told_by_others, rank=0)
    assert (event["kind"], event["value"]) == ("memory format", "contiguous")
    assert "neighbours" in event["reason"]


def test_ranks_on_whole_gpus_go_with_the_one_on_a_slice() -> None:
    event = agreed("cuda:0%16", told_by_others=[WHOLE], rank=1)
    assert event["value"] == "contiguous"
    assert event["reason"].startswith("for rank 1 beside rank 0: on a slice")
