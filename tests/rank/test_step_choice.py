"""What ranks try before training where one is on a slice; what a whole GPU takes is tested with the replica."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from outrider.data.feed import make_feed
from outrider.machine.devices import parse_devices
from outrider.policy.effects import Decision
from outrider.policy.policies import policy_spec
from outrider.rank import step_choice
from outrider.rank.step_choice import agree_on_format, check_products, decide_execution
from outrider.replica.half_products import HalfProduct
from outrider.replica.recipe import Recipe
from outrider.replica.replica import Replica
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


CPU = torch.device("cpu")
DATA = torch.randn(40, 12)


def checked(device: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Replica, list[str]]:
    """A replica after the check, and the products that a slice would look at."""
    looked_at: list[str] = []

    def mend(spec: Any, *, rank: int, of_step: Sequence[HalfProduct]) -> None:
        looked_at.extend(map(str, of_step))

    monkeypatch.setattr(step_choice, "mend_products", mend)
    recipe = Recipe(
        **{
            "model": lambda: nn.Sequential(nn.Linear(12, 5), nn.BatchNorm1d(5), nn.Dropout(), nn.Linear(5, 1)),
            "optimizer": partial(torch.optim.Adam, lr=0.1),
            "step": lambda model, batch: model(batch).square().mean(),
            "dataset": DATA,
            "batch_size": 16,
            "policy": "cadence",
            "precision": "bf16",
            **options,
        }
    )
    replica = Replica(recipe, device=CPU, rank=0, name=device)
    world: Any = SimpleNamespace(rank=0, spec=parse_devices([device])[0])
    random_state = torch.get_rng_state()
    check_products(replica, make_feed(DATA, device=CPU, seed=0), world=world)
    assert torch.equal(torch.get_rng_state(), random_state)
    return replica, looked_at


def test_a_slice_looks_at_the_products_of_the_step_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    replica, looked_at = checked("cuda:0%30", monkeypatch)
    assert looked_at == [
        "addmm of 16 × 12 and 12 × 5 in bfloat16",
        "addmm of 16 × 5 and 5 × 1 in bfloat16",
        "mm of 16 × 1 and 1 × 5 in bfloat16",
        "mm of 1 × 16 and 16 × 5 in bfloat16",
        "mm of 5 × 16 and 16 × 12 in bfloat16",
    ]
    assert (replica.steps, replica.loss_sums.drain()) == (0, (0.0, 0))
    assert int(replica.model[1].num_batches_tracked) == 0
    assert all(parameter.grad is None for parameter in replica.model.parameters())


def test_products_of_micro_batches_are_those_of_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    _, looked_at = checked("cuda:0%30", monkeypatch, micro_batch=8)
    assert looked_at[0] == "addmm of 8 × 12 and 12 × 5 in bfloat16"


@pytest.mark.parametrize(("device", "precision"), [("cuda:0", "bf16"), ("cpu", "bf16"), ("cuda:0%30", "fp32")])
def test_whole_devices_and_single_precision_have_nothing_to_look_at(
    monkeypatch: pytest.MonkeyPatch, device: str, precision: str
) -> None:
    assert checked(device, monkeypatch, precision=precision)[1] == []


def test_an_error_of_the_step_is_left_to_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(model: nn.Module, batch: Any) -> torch.Tensor:
        model(batch)
        raise ValueError("no target")

    assert len(checked("cuda:0%30", monkeypatch, step=fails)[1]) == 2


@pytest.mark.parametrize(
    ("policy", "overlaps", "is_told"), [("balanced", True, True), ("balanced", False, False), ("async", True, False)]
)
def test_it_is_told_that_shared_steps_of_a_captured_replica_run_eagerly(
    monkeypatch: pytest.MonkeyPatch, policy: str, overlaps: bool, is_told: bool
) -> None:
    chosen = Decision("execution", "graph", "a captured step is faster", {})
    monkeypatch.setattr(step_choice, "choose_execution", lambda *given, **options: chosen)
    replica: Any = SimpleNamespace(batch_size=16, recipe=SimpleNamespace(policy_spec=policy_spec(policy)))
    recorder = Recorder(0, origin_s=0.0)
    feed = make_feed(DATA, device=CPU, seed=0)
    decide_execution(replica, feed, recorder=recorder, can_overlap=lambda: overlaps)
    (event,) = recorder.events
    eagerly = "; gradients of shared steps are computed eagerly: their sums then overlap with the backward pass"
    assert event["reason"] == chosen.reason + eagerly * is_told
