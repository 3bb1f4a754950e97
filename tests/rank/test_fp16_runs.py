"""fp16 in whole runs: in shared steps all ranks skip together when one has overflowed, in local steps that rank alone.

The models are in float64, which autocast leaves alone, so that scaling loses nothing and runs can be compared exactly.
"""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import outrider

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

SIZE, BATCH, BAD_CALL = 96, 8, 3


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(SIZE, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return inputs, inputs.sum(1, keepdim=True)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    # Without momentum, a step without a gradient changes nothing, as one that is skipped.
    return torch.optim.SGD(parameters, lr=0.05)


def step(model: nn.Module, batch: Any, *, factors: tuple[float, float]) -> torch.Tensor:
    """Squared error; at one call of each rank the gradient is multiplied by its factor."""
    model.num_calls = getattr(model, "num_calls", 0) + 1  # type: ignore[assignment]
    outputs = model(batch[0])
    factor = factors[torch.distributed.get_rank() if torch.distributed.is_initialized() else 0]
    if model.num_calls == BAD_CALL and factor != 1.0:
        outputs.register_hook(lambda gradient: gradient * factor)
    loss: torch.Tensor = (outputs - batch[1]).square().mean()
    return loss


def run(folder: Path, policy: str, *, factors: tuple[float, float], **changes: Any) -> dict[str, torch.Tensor]:
    options = {"batch_size": BATCH, "policy": policy, "threads_per_rank": 1, "devices": "cpu,cpu", "seed": 4}
    options |= {"shares": [0.5, 0.5], **({"anchor": 2} if policy in ("cadence", "async") else {})}
    outrider.train(
        make_model,
        make_optimizer,
        partial(step, factors=factors),
        make_data(),
        run_dir=folder,
        **{**options, **changes},
    ).join()
    return load_file(folder / "model.safetensors")


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = json.loads((folder / "timeline.json").read_text())["events"]
    return [event for event in found if event["kind"] == kind]


def assert_close(mine: dict[str, torch.Tensor], its: dict[str, torch.Tensor]) -> None:
    for name in mine:
        torch.testing.assert_close(mine[name], its[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("policy", "without"), [("sync", (0.0, 0.0)), ("balanced", (0.0, 0.0)), ("cadence", (1.0, 0.0))]
)
def test_an_overflow_on_one_rank_skips_the_step_of_all_that_share_it(
    policy: str, without: tuple[float, float], tmp_path: Path
) -> None:
    skipped = run(tmp_path / "fp16", policy, factors=(1.0, math.inf), precision="fp16")
    assert_close(skipped, run(tmp_path / "fp32", policy, factors=without))
    (event,) = events(tmp_path / "fp16", "loss scale")
    assert (event["rank"], event["value"]) == (1, 2.0**15)


def test_async_goes_on_after_an_overflow(tmp_path: Path) -> None:
    trained = run(tmp_path, "async", factors=(1.0, math.inf), precision="fp16", epochs=2)
    assert all(bool(value.isfinite().all()) for value in trained.values())
    assert [event["rank"] for event in events(tmp_path, "loss scale")] == [1]


def test_one_device_skips_too(tmp_path: Path) -> None:
    alone = {"devices": "cpu", "shares": None}
    skipped = run(tmp_path / "fp16", "sync", factors=(math.nan, 1.0), precision="fp16", **alone)
    assert_close(skipped, run(tmp_path / "fp32", "sync", factors=(0.0, 1.0), **alone))


def test_only_a_rank_with_loss_scaling_may_overflow(tmp_path: Path) -> None:
    mixed = {"precision": ["fp16", "auto"]}
    assert_close(
        run(tmp_path / "skips", "sync", factors=(math.inf, 1.0), **mixed),
        run(tmp_path / "fp32", "sync", factors=(0.0, 0.0)),
    )
    chosen = {event["rank"]: event["value"] for event in events(tmp_path / "skips", "precision")}
    assert chosen == {0: "fp16", 1: "fp32"}
    with pytest.raises(outrider.StepError, match=r"^rank 1 \(cpu\), step 2: the gradient is not finite"):
        run(tmp_path / "fails", "sync", factors=(1.0, math.inf), **mixed)


def test_the_lab_skips_as_ranks_do() -> None:
    def trained(factor: float, precision: Any) -> dict[str, torch.Tensor]:
        own_step = partial(step, factors=(factor, 1.0))
        return outrider.lab(
            make_model,
            make_optimizer,
            own_step,
            make_data(),
            speeds=(1.0, 1.0),
            batch_size=BATCH,
            policy="sync",
            precision=precision,
        ).state_dict()

    assert_close(trained(math.inf, "fp16"), trained(0.0, "fp32"))
    with pytest.raises(outrider.StepError, match="the gradient is not finite"):
        trained(math.inf, ["fp16", "fp32"])
