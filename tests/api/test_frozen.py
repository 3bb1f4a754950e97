"""Frozen tensors are brought to all ranks once, and then cost nothing; they may be frozen and thawed during a run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outrider

Trainer = Callable[..., outrider.Run]
Events = Callable[[Path, str], list[dict[str, Any]]]

POLICIES = ("auto", "sync", "balanced", "cadence", "async")
FACTS_BYTES = 2 * (15 * 2 * 4 + 3 * 8)
"""Of two ranks: 15 numbers, two float32 slots for each, and three norms."""


class Adapted(nn.Module):
    """A frozen layer in bfloat16, packed integers, a table and a mask; the trained part has 8 + 32 parameters."""

    def __init__(self, *, is_odd: bool = False) -> None:
        super().__init__()
        self.base = nn.Linear(4, 512, dtype=torch.bfloat16).requires_grad_(False)
        self.packed = nn.Parameter(torch.randint(0, 255, (64, 128), dtype=torch.uint8), requires_grad=False)
        self.register_buffer("table", torch.randn(64, 64))
        self.register_buffer("mask", torch.rand(128, 128) > 0.5, persistent=False)
        self.down = nn.Linear(4, 8, bias=False)
        self.up = nn.Linear(8, 1, bias=False)
        if is_odd:
            # Every process has values of its own.
            for tensor in (self.base.weight.data, self.table):
                tensor.copy_(torch.full(tensor.shape, (os.getpid() % 97) / 97))
            self.packed.data.fill_(os.getpid() % 97)
            self.mask.fill_(os.getpid() % 2 == 0)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        fixed = self.base(inputs.bfloat16()).float().mean(dim=1, keepdim=True)
        return self.up(self.down(inputs)) + fixed + self.table.mean()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def tell_sums(folder: Path, context: outrider.EpochContext) -> None:
    """Each rank writes what its tensors look like, those that no file contains included."""
    named = [*context.model.named_parameters(), *context.model.named_buffers()]
    sums = {name: tensor.double().sum().item() for name, tensor in named}
    (folder / f"epoch{context.epoch}-rank{context.rank}.json").write_text(json.dumps(sums))


def told_sums(folder: Path, epoch: int) -> list[dict[str, float]]:
    return [json.loads((folder / f"epoch{epoch}-rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_an_average_sends_what_is_trained_and_nothing_else(
    train_two: Trainer, tmp_path: Path, events: Events, policy: str
) -> None:
    train_two(model=Adapted, optimizer=adam, epochs=2, policy=policy, run_dir=tmp_path / "run").join()
    sent = {event["bytes"] for event in events(tmp_path / "run", "average end")}
    assert sent == {4 * (32 + 16) + FACTS_BYTES}  # 8 parameters of `up` and the alignment after them
    (layout,) = events(tmp_path / "run", "layout")
    assert layout["trained"] == 40
    assert layout["resting"] == 4 * 512 + 512 + 64 * 128 + 64 * 64 + 128 * 128
    assert layout["gradient_bytes"] == 0


@pytest.mark.parametrize("policy", ["cadence", "async", "balanced"])
def test_averaged_optimizer_state_of_frozen_parameters_is_not_sent(
    train_two: Trainer, tmp_path: Path, events: Events, policy: str
) -> None:
    train_two(
        model=Adapted, optimizer=adam, epochs=2, policy=policy, average_optimizer=True, run_dir=tmp_path / "run"
    ).join()
    sent = {event["bytes"] for event in events(tmp_path / "run", "average end")}
    with_moments = 4 * 3 * (32 + 16) + FACTS_BYTES
    assert all(one <= with_moments for one in sent)


def test_all_ranks_have_the_frozen_tensors_of_rank_0(train_two: Trainer, tmp_path: Path) -> None:
    train_two(
        model=partial(Adapted, is_odd=True),
        epochs=1,
        devices="cpu,cpu",
        epoch_end=partial(tell_sums, tmp_path),
        run_dir=tmp_path / "run",
    ).join()
    first, second = told_sums(tmp_path, 0)
    assert first == second


def test_rank_files_of_a_checkpoint_leave_frozen_tensors_out(train_two: Trainer, tmp_path: Path) -> None:
    done = train_two(model=Adapted, optimizer=adam, epochs=1, checkpoint_every=1, run_dir=tmp_path / "run").join()
    (newest,) = (tmp_path / "run" / "checkpoints").glob("epoch*")
    frozen_bytes = 2 * (4 * 512 + 512) + 64 * 128 + 4 * 64 * 64
    assert all((newest / f"rank{rank}.pt").stat().st_size < frozen_bytes for rank in range(2))
    assert {"base.weight", "packed", "table", "up.weight"} <= set(done.state_dict)


def test_shared_steps_send_the_gradients_of_what_is_trained(train_two: Trainer, tmp_path: Path, events: Events) -> None:
    train_two(model=Adapted, epochs=1, policy="sync", run_dir=tmp_path / "run").join()
    (layout,) = events(tmp_path / "run", "layout")
    assert 4 * 40 < layout["gradient_bytes"] < 1024


# Freezing and thawing


class Tower(nn.Module):
    """Two layers; the lower one starts frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(4, 8).requires_grad_(False)
        self.high = nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.high(torch.tanh(self.low(inputs)))


def thaw_in_epoch_1(context: outrider.EpochContext) -> None:
    if context.epoch == 1:
        context.model.low.requires_grad_(True)


def freeze_in_epoch_1(context: outrider.EpochContext) -> None:
    if context.epoch == 1:
        context.model.high.requires_grad_(False)
        context.model.low.requires_grad_(True)


def thaw_on_rank_1(context: outrider.EpochContext) -> None:
    if context.rank == 1:
        context.model.low.weight.requires_grad_(True)


def stop_after_epoch_1(context: outrider.EpochContext) -> None:
    if context.epoch == 1:
        context.stop()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_layer_is_thawed_at_the_start_of_an_epoch(
    train_two: Trainer, tmp_path: Path, events: Events, policy: str
) -> None:
    train_two(
        model=Tower,
        epochs=3,
        policy=policy,
        epoch_start=thaw_in_epoch_1,
        epoch_end=partial(tell_sums, tmp_path),
        run_dir=tmp_path / "run",
    ).join()
    told = [told_sums(tmp_path, epoch) for epoch in range(3)]
    assert all(first == second for first, second in told)
    assert told[1][0]["low.weight"] != told[0][0]["low.weight"]
    assert told[2][0]["low.weight"] != told[1][0]["low.weight"]
    before, after = events(tmp_path / "run", "layout")
    assert (before["trained"], after["trained"]) == (9, 49)
    assert after["thawed"] == ["low.bias", "low.weight"]


@pytest.mark.parametrize("policy", ["sync", "balanced"])
def test_shared_steps_of_a_thawed_layer_are_those_of_one_device(
    train_two: Trainer, tmp_path: Path, policy: str
) -> None:
    options = {"model": Tower, "epochs": 3, "policy": policy, "epoch_start": thaw_in_epoch_1, "seed": 3}
    whole = 16 if policy == "sync" else 8
    shared = train_two(**options, run_dir=tmp_path / "two").join().state_dict
    alone = train_two(**options, devices="cpu", batch_size=whole, run_dir=tmp_path / "one").join().state_dict
    for name, value in shared.items():
        torch.testing.assert_close(value, alone[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_frozen_layer_leaves_the_averages(train_two: Trainer, tmp_path: Path, events: Events, policy: str) -> None:
    train_two(
        model=Tower,
        epochs=3,
        policy=policy,
        epoch_start=freeze_in_epoch_1,
        epoch_end=partial(tell_sums, tmp_path),
        run_dir=tmp_path / "run",
    ).join()
    told = [told_sums(tmp_path, epoch) for epoch in range(3)]
    assert all(first == second for first, second in told)
    assert told[2][0]["high.weight"] == told[0][0]["high.weight"]
    assert told[2][0]["low.weight"] != told[1][0]["low.weight"]
    _, last = events(tmp_path / "run", "layout")
    assert last["frozen"] == ["high.bias", "high.weight"]
    assert (last["trained"], last["resting"]) == (40, 9)


@pytest.mark.parametrize("policy", ["cadence", "sync"])
def test_ranks_that_thaw_different_parameters_are_refused(train_two: Trainer, tmp_path: Path, policy: str) -> None:
    run = train_two(model=Tower, epochs=2, policy=policy, epoch_start=thaw_on_rank_1, run_dir=tmp_path / "run")
    with pytest.raises(outrider.OutriderError) as caught:
        run.join()
    assert "low.weight was thawed on rank 1, and not on rank 0" in str(caught.value)
    assert "freeze and thaw the same parameters on all ranks" in str(caught.value)


def add_a_layer(context: outrider.EpochContext) -> None:
    if context.epoch == 1:
        context.model.extra = nn.Linear(4, 4)
        context.optimizer.add_param_group({"params": list(context.model.extra.parameters())})


@pytest.mark.parametrize("policy", ["cadence", "sync", "balanced"])
def test_a_layer_that_is_added_during_a_run_is_refused(train_two: Trainer, tmp_path: Path, policy: str) -> None:
    """No average and no sum of gradients would have it, and each rank would train its own."""
    run = train_two(model=Tower, epochs=2, policy=policy, epoch_start=add_a_layer, run_dir=tmp_path / "run")
    with pytest.raises(outrider.OutriderError) as caught:
        run.join()
    assert "the parameter extra." in str(caught.value)
    assert "was added or replaced after the run began" in str(caught.value)


class Averaging(nn.Module):
    """Assigns a buffer anew in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
        return self.layer(inputs - self.mean)


@pytest.mark.parametrize("policy", ["async", "cadence"])
def test_a_buffer_that_is_assigned_anew_is_no_fault(train_two: Trainer, tmp_path: Path, policy: str) -> None:
    train_two(model=Averaging, epochs=2, policy=policy, verify=True, run_dir=tmp_path / "run").join()


class Remembering(nn.Module):
    """Has a state that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs)

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None:
        del state


def test_a_model_that_could_not_be_written_is_refused_before_training(train_here: Trainer, tmp_path: Path) -> None:
    with pytest.raises(outrider.OutriderError, match="_extra_state, a dict and not a tensor, which cannot be saved"):
        train_here(model=Remembering, epochs=1, run_dir=tmp_path / "run").join()


def make_unequal_tower() -> nn.Module:
    model = Tower()
    model.low.bias.requires_grad_(os.environ["RANK"] == "1")
    return model


def test_models_that_are_frozen_differently_are_refused(train_two: Trainer, tmp_path: Path) -> None:
    with pytest.raises(outrider.OutriderError) as caught:
        train_two(model=make_unequal_tower, epochs=1, run_dir=tmp_path / "run").join()
    assert "low.bias is trained on rank 1, but not on rank 0" in str(caught.value)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_resumes_with_what_was_thawed_before(train_here: Trainer, tmp_path: Path, policy: str) -> None:
    options = {"model": Tower, "optimizer": adam, "epochs": 4, "policy": policy, "epoch_start": thaw_in_epoch_1}
    whole = train_here(**options, run_dir=tmp_path / "whole").join().state_dict
    train_here(**options, run_dir=tmp_path / "cut", epoch_end=stop_after_epoch_1).join()
    resumed = train_here(**options, resume=tmp_path / "cut", run_dir=tmp_path / "resumed").join().state_dict
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["sync", "async"])
def test_two_ranks_resume_with_what_was_thawed_before(
    train_two: Trainer, tmp_path: Path, events: Events, policy: str
) -> None:
    options = {"model": Tower, "epochs": 4, "policy": policy, "epoch_start": thaw_in_epoch_1}
    whole = train_two(**options, run_dir=tmp_path / "whole").join().state_dict
    cut = train_two(**options, run_dir=tmp_path / "cut", epoch_end=stop_after_epoch_1).join().state_dict
    resumed = train_two(**options, resume=tmp_path / "cut", run_dir=tmp_path / "resumed").join().state_dict
    (layout,) = events(tmp_path / "resumed", "layout")
    assert layout["trained"] == 49
    assert not torch.equal(resumed["low.weight"], cut["low.weight"])
    if policy == "sync":
        assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


# Buffers and frozen parameters that change after all


class Codebook(nn.Module):
    """A buffer that steps change through `.data`, which no version counter tells of, and a teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.teacher = nn.Linear(4, 1024).requires_grad_(False)
        self.register_buffer("codes", torch.zeros(64, 64))
        self.register_buffer("table", torch.ones(64, 64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.codes.data.mul_(0.9).add_(inputs.mean())
            self.teacher.weight.data.mul_(0.9).add_(inputs.mean())
        return self.layer(inputs) + 0.0 * self.codes.mean()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_seen_to_change_is_averaged_from_then_on(
    train_two: Trainer, tmp_path: Path, events: Events, policy: str
) -> None:
    train_two(
        model=Codebook,
        epochs=3,
        policy=policy,
        epoch_end=partial(tell_sums, tmp_path),
        run_dir=tmp_path / "run",
    ).join()
    layouts = events(tmp_path / "run", "layout")
    assert layouts[-1]["changing"] == ["codes", "teacher.weight"]
    assert layouts[-1]["resting"] == 64 * 64 + 1024
    for epoch in (1, 2):
        first, second = told_sums(tmp_path, epoch)
        assert first == second
