"""fp16: losses are scaled, gradients unscaled, steps that overflowed skipped; and which precision a device gets."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outrider.errors import ConfigError, StepError
from outrider.policy.effects import Decision
from outrider.replica import loss_scale
from outrider.replica.loss_scale import FIRST_SCALE
from outrider.replica.precision import choose_precision
from outrider.replica.recipe import Recipe
from outrider.replica.replica import Replica

CPU = torch.device("cpu")
DATA = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def overflowing(model: nn.Module, batch: Tensor) -> Tensor:
    """A finite loss whose gradient is not."""
    outputs = model(batch)
    outputs.register_hook(lambda gradient: gradient * math.inf)
    return outputs.square().mean()


def make(rank: int = 0, **options: Any) -> Replica:
    defaults: dict[str, Any] = {
        "model": lambda: nn.Linear(3, 1).double(),
        "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "step": squares,
        "dataset": DATA,
        "batch_size": 8,
        "policy": "cadence",
        "precision": "fp16",
    }
    return Replica(Recipe(**{**defaults, **options}), device=CPU, rank=rank, name="cpu")


def scale_of(replica: Replica) -> float:
    assert replica.loss_scale is not None
    return replica.loss_scale.value


def test_scaling_by_a_power_of_two_changes_no_number() -> None:
    scaled, plain = make(max_grad_norm=0.1), make(max_grad_norm=0.1, precision="fp32")
    for number in range(3):
        scaled.step(DATA, samples=8, at=8 * number)
        plain.step(DATA, samples=8, at=8 * number)
    assert torch.equal(scaled.model.weight, plain.model.weight)
    assert scaled.loss_sums.drain() == plain.loss_sums.drain()


def test_a_step_that_overflows_is_skipped_and_halves_the_scale() -> None:
    told: list[Decision] = []
    replica = make(step=overflowing)
    replica.on_loss_scale = told.append
    before = replica.model.weight.detach().clone()
    replica.step(DATA, samples=8, at=0)
    assert torch.equal(replica.model.weight, before)
    assert (replica.steps, len(replica.optimizer.state)) == (1, 0)
    assert scale_of(replica) == FIRST_SCALE / 2
    assert told == [Decision("loss scale", FIRST_SCALE / 2, "the gradient of step 0 overflowed")]
    replica.check_finite()


@pytest.mark.filterwarnings("error")
def test_a_first_step_that_is_skipped_brings_no_advice_on_the_order_of_schedule_and_optimizer() -> None:
    replica = make(step=overflowing, scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.5))
    replica.step(DATA, samples=8, at=0)
    replica.step(DATA, samples=8, at=8)
    assert replica.optimizer.param_groups[0]["lr"] == 0.05


def test_a_gradient_that_is_never_finite_is_an_error() -> None:
    replica = make(step=overflowing)
    for number in range(16):
        replica.step(DATA, samples=8, at=8 * number)
    assert scale_of(replica) == 1.0
    with pytest.raises(StepError, match=r"^rank 0 \(cpu\), step 16: the gradient is not finite"):
        replica.step(DATA, samples=8, at=8 * 16)


def test_the_scale_grows_after_many_steps_without_an_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "STEPS_TO_GROW", 3)
    replica = make()
    scales = []
    for number in range(4):
        replica.step(DATA, samples=8, at=8 * number)
        scales.append(scale_of(replica))
    assert scales == [FIRST_SCALE, FIRST_SCALE, 2 * FIRST_SCALE, 2 * FIRST_SCALE]


def test_a_rank_that_skips_for_another_keeps_its_scale() -> None:
    replica = make()
    replica.gradient(DATA, samples=8)
    replica.skip_update(at=0)
    assert scale_of(replica) == FIRST_SCALE
    spoiled = make(step=overflowing)
    spoiled.gradient(DATA, samples=8)
    spoiled.no_gradient()
    spoiled.skip_update(at=0)
    assert scale_of(spoiled) == FIRST_SCALE


def test_the_scale_is_in_checkpoints() -> None:
    replica, again, without = make(step=overflowing), make(), make(precision="fp32")
    replica.step(DATA, samples=8, at=0)
    again.restore(replica.state())
    assert scale_of(again) == FIRST_SCALE / 2
    without.restore(replica.state())
    again.restore(without.state())
    assert scale_of(again) == FIRST_SCALE / 2


def test_forward_runs_in_fp16_and_parameters_stay_as_they_are() -> None:
    dtypes = []

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        outputs = model(batch)
        dtypes.append(outputs.dtype)
        return outputs.float().square().mean()

    replica = make(model=lambda: nn.Linear(3, 1), step=step)
    replica.step(DATA.float(), samples=8, at=0)
    assert dtypes == [torch.float16]
    assert replica.model.weight.dtype == torch.float32


# Which precision


def capability(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: version)
    return torch.device("cuda:0")


@pytest.mark.parametrize(
    ("version", "expected"), [((9, 0), "bf16"), ((8, 0), "bf16"), ((7, 5), "fp16"), ((7, 0), "fp16"), ((6, 1), "fp32")]
)
def test_auto_is_what_the_card_computes_natively(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], expected: str
) -> None:
    device = capability(monkeypatch, version)
    assert choose_precision("auto", rank=0, device=device, name="cuda:0").value == expected


def test_one_precision_per_rank() -> None:
    values = [choose_precision(("fp16", "auto", "bf16"), rank=rank, device=CPU, name="cpu").value for rank in range(3)]
    assert values == ["fp16", "fp32", "bf16"]
    with pytest.raises(ConfigError, match="precision has 2 values for 3 ranks"):
        make(precision=("fp16", "fp32")).recipe.check_ranks(3)


@pytest.mark.parametrize("value", ["fp8", ("fp16", "half"), 16])
def test_unknown_precisions_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^unknown precision "):
        make(precision=value)


def test_fp16_is_refused_where_torch_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda device_type: False)
    with pytest.raises(ConfigError) as caught:
        make(rank=1)
    assert str(caught.value) == (
        f"rank 1 (cpu): torch {torch.__version__} has no fp16 autocast for cpu devices\n"
        "hint: pass precision='auto', or one per rank such as precision=['fp16', 'fp32']"
    )
