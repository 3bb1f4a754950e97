"""A gradient that is not finite where the loss is: found before it reaches other ranks, the model or a checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import outrider

from .conftest import Trainer, make_data, make_model, make_optimizer, squared_error

POLICIES = ["auto", "sync", "balanced", "cadence", "async"]
HINT = (
    "hint: a root or logarithm of 0 and a division by 0 have such gradients, and too high a learning rate may; "
    "torch.autograd.set_detect_anomaly(True) names the operation"
)


def spoiled(loss: torch.Tensor, model: nn.Module, kind: str) -> torch.Tensor:
    """The same loss with a gradient that is not finite: the root of 0 has an infinite one."""
    weight = next(model.parameters()).sum()
    return loss + ((weight * 0) if kind == "nan" else (weight - weight.detach())).sqrt()


def bad_at_call(model: nn.Module, batch: Any, *, call: int, kind: str = "nan", rank: int = 0) -> Any:
    model.num_calls = getattr(model, "num_calls", 0) + 1  # type: ignore[assignment]
    loss = squared_error(model, batch)
    here = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    return spoiled(loss, model, kind) if (here, model.num_calls) == (rank, call) else loss


def error_of(run: outrider.Run) -> outrider.StepError:
    with pytest.raises(outrider.StepError) as caught:
        run.join()
    return caught.value


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_one_device_names_the_step_of_a_gradient_that_is_not_finite(
    train_here: Trainer, policy: str, kind: str
) -> None:
    error = error_of(train_here(policy=policy, step=partial(bad_at_call, call=6, kind=kind)))
    assert str(error) == f"rank 0 (cpu), step 5: the gradient is not finite\n{HINT}"
    assert (error.rank, error.step) == (0, 5)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_last_step_of_a_run_is_watched_too_and_the_last_checkpoint_stays(
    train_here: Trainer, policy: str, tmp_path: Path, read_json: Any
) -> None:
    # Two epochs of 12 batches.
    error_of(train_here(policy=policy, epochs=2, checkpoint_every=1, step=partial(bad_at_call, call=24)))
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("epoch*"))
    assert saved == ["epoch00001-000000000000"]
    model = load_file(tmp_path / "run" / "checkpoints" / saved[0] / "model.safetensors")
    assert all(bool(value.isfinite().all()) for value in model.values())
    assert read_json(tmp_path / "run" / "record.json")["status"] == "failed"
    assert not (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_rank_whose_gradient_is_not_finite_is_named(train_two: Trainer, policy: str, tmp_path: Path) -> None:
    # Else the slower rank may rest before its third call.
    shares = (0.6, 0.4) if policy in ("auto", "balanced") else None
    step = partial(bad_at_call, call=3, rank=1)
    error = error_of(train_two(policy=policy, epochs=4, run_dir=tmp_path, step=step, shares=shares))
    assert error.message.startswith("rank 1 (cpu@0.5), step ")
    assert error.message.endswith(": the gradient is not finite")
    assert error.rank == 1


def test_a_clipped_gradient_that_is_not_finite_is_an_error(train_here: Trainer) -> None:
    error = error_of(train_here(max_grad_norm=1.0, step=partial(bad_at_call, call=2)))
    assert error.message == "rank 0 (cpu), step 1: the gradient is not finite"


def large_rate(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=3e38)


def test_an_update_that_is_not_finite_is_told_from_such_a_gradient(train_here: Trainer) -> None:
    one_batch = tuple(1e3 * column for column in make_data(8))
    error = error_of(train_here(optimizer=large_rate, dataset=one_batch))
    assert str(error) == (
        "rank 0 (cpu), step 0: the parameters are not finite after the update\n"
        "hint: lower the learning rate, or set max_grad_norm"
    )


def spoil_parameters(context: outrider.EpochContext) -> None:
    if context.epoch == 1:
        with torch.no_grad():
            next(context.model.parameters()).fill_(float("nan"))


def test_parameters_that_a_callback_spoiled_are_not_saved(train_here: Trainer, tmp_path: Path) -> None:
    error = error_of(train_here(epochs=2, checkpoint_every=1, epoch_end=spoil_parameters))
    assert error.message == "rank 0 (cpu), step 24: the parameters are not finite, so no checkpoint is written"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("epoch*")] == ["epoch00001-000000000000"]


# In a loop of the user's own


@pytest.mark.parametrize("policy", POLICIES)
def test_a_loop_of_the_user_is_told_the_step(policy: Any, tmp_path: Path) -> None:
    with pytest.raises(outrider.StepError, match=r"^rank 0 \(cpu\), step 2: the gradient is not finite\n"):
        loop_with_a_bad_step(policy, tmp_path)


def loop_with_a_bad_step(policy: Any, folder: Path) -> None:
    model = make_model()
    with outrider.Session(devices="cpu", policy=policy, run_dir=folder) as session:
        session.prepare(model, make_optimizer(model.parameters()))
        for number, batch in enumerate(session.batches(make_data(), batch_size=8)):
            loss = squared_error(model, batch)
            session.step(spoiled(loss, model, "nan") if number == 2 else loss)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_that_a_gradient_scaler_skips_is_no_error(policy: Any, tmp_path: Path) -> None:
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    # So large a scale that the first gradients are infinite: the scaler skips these steps and halves it.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**128 - 2.0**104, growth_interval=1_000)
    steps = []
    with outrider.Session(devices="cpu", policy=policy, run_dir=tmp_path) as session:
        session.prepare(model, optimizer, scaler)
        for batch in session.batches(make_data(), batch_size=8):
            optimizer.zero_grad()
            scaler.scale(squared_error(model, batch)).backward()
            scaler.step(optimizer)
            steps.append(scaler.get_scale())
            scaler.update()
    assert steps[0] > steps[-1]
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
