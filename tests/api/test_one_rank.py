"""One rank in this very process: every policy is then a plain loop, and the options do what they say."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outrider
from outrider.data.order import shuffled
from outrider.policy.effects import Lease

Trainer = Callable[..., outrider.Run]
Events = Callable[[Path, str], list[dict[str, Any]]]
Problem = dict[str, Any]


def trained(run: outrider.Run) -> torch.Tensor:
    """All parameters of a run as one vector."""
    return flat(run.join().state_dict)


def flat(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([state[name].flatten() for name in sorted(state)])


def plain_loop(problem: Problem, *, epochs: int, batch_size: int = 8, seed: int = 0) -> torch.Tensor:
    """What anybody would write by hand."""
    torch.manual_seed(seed)
    model = problem["model"]()
    optimizer = problem["optimizer"](model.parameters())
    inputs, targets = problem["dataset"]
    for epoch in range(epochs):
        order = shuffled(len(inputs), seed=seed, epoch=epoch)
        for batch in Lease(0, len(inputs)).batches(batch_size):
            chosen = order[batch.start : batch.stop]
            optimizer.zero_grad()
            problem["step"](model, (inputs[chosen], targets[chosen])).backward()
            optimizer.step()
    return flat(model.state_dict())


class Numbered(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """A data set that is not made of tensors; each sample carries its index."""

    def __init__(self, data: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data[0])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.data[0][index], self.data[1][index], index


class Watch:
    """A step function that remembers what it saw; possible because the rank is this process."""

    def __init__(self, look: Callable[[nn.Module, Any], Any]) -> None:
        self.look = look
        self.seen: list[Any] = []

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        self.seen.append(self.look(model, batch))
        return (model(batch[0]) - batch[1]).square().mean()


# Policies, data and numbers


@pytest.mark.parametrize("policy", ["sync", "balanced", "cadence", "async", "independent"])
def test_one_rank_equals_a_plain_loop_to_the_bit(train_here: Trainer, problem: Problem, policy: str) -> None:
    assert torch.equal(trained(train_here(policy=policy, epochs=2)), plain_loop(problem, epochs=2))


def test_batches_that_do_not_divide_the_data_set_equal_a_plain_loop_to_the_bit(
    train_here: Trainer, problem: Problem
) -> None:
    assert torch.equal(trained(train_here(batch_size=7, epochs=2)), plain_loop(problem, epochs=2, batch_size=7))


def test_the_seed_decides_parameters_and_order(train_here: Trainer, problem: Problem) -> None:
    assert torch.equal(trained(train_here(seed=5)), plain_loop(problem, epochs=1, seed=5))


def test_a_model_that_is_passed_itself_is_trained_from_its_own_parameters_and_left_alone(
    train_here: Trainer, problem: Problem
) -> None:
    torch.manual_seed(0)
    model = problem["model"]()
    before = flat(model.state_dict()).clone()
    assert torch.equal(trained(train_here(model=model)), plain_loop(problem, epochs=1))
    assert torch.equal(flat(model.state_dict()), before)


def test_shuffle_false_takes_the_samples_in_their_order(train_here: Trainer, problem: Problem) -> None:
    step = Watch(lambda model, batch: batch[2].tolist())
    train_here(step=step, dataset=Numbered(problem["dataset"]), shuffle=False).join()
    assert list(itertools.chain(*step.seen)) == list(range(96))


def test_every_epoch_has_an_order_of_its_own_with_every_sample_once(train_here: Trainer, problem: Problem) -> None:
    step = Watch(lambda model, batch: batch[2].tolist())
    train_here(step=step, dataset=Numbered(problem["dataset"]), epochs=2).join()
    first, second = list(itertools.chain(*step.seen[:12])), list(itertools.chain(*step.seen[12:]))
    assert sorted(first) == sorted(second) == list(range(96))
    assert first != second


def test_a_function_that_makes_the_data_set_will_do(train_here: Trainer, problem: Problem) -> None:
    assert torch.equal(trained(train_here(dataset=lambda: problem["dataset"])), plain_loop(problem, epochs=1))


def test_collate_makes_the_batches(train_here: Trainer, problem: Problem) -> None:
    step = Watch(lambda model, batch: batch[2])
    train_here(step=step, dataset=Numbered(problem["dataset"]), collate=stacked_and_named).join()
    assert step.seen == ["collated"] * 12


def stacked_and_named(samples: list[Any]) -> Any:
    return torch.stack([sample[0] for sample in samples]), torch.stack([sample[1] for sample in samples]), "collated"


def test_workers_read_ahead_and_change_nothing(train_here: Trainer, problem: Problem, events: Events) -> None:
    run = train_here(dataset=Numbered(problem["dataset"]), step=first_two, workers=1)
    assert torch.equal(trained(run), plain_loop(problem, epochs=1))
    assert events(run.run_dir, "ready")[0]["feed"] == "Numbered is read ahead by workers (1)"


def first_two(model: nn.Module, batch: Any) -> Any:
    return (model(batch[0]) - batch[1]).square().mean()


def test_resident_tensors_train_like_any(train_here: Trainer, problem: Problem) -> None:
    assert torch.equal(trained(train_here(resident=True)), plain_loop(problem, epochs=1))


def test_resident_data_must_be_tensors(train_here: Trainer, problem: Problem) -> None:
    run = train_here(dataset=Numbered(problem["dataset"]), resident=True)
    with pytest.raises(outrider.ConfigError) as caught:
        run.join()
    assert str(caught.value) == (
        "resident=True needs a data set made of tensors, got Numbered\n"
        "hint: make it a torch.utils.data.TensorDataset, or leave resident out"
    )


def test_max_grad_norm_bounds_the_step(train_here: Trainer, problem: Problem) -> None:
    options = {"optimizer": lambda p: torch.optim.SGD(p, lr=1.0), "batch_size": 96, "max_grad_norm": 1e-3}
    torch.manual_seed(0)
    start = flat(problem["model"]().state_dict())
    moved = (trained(train_here(**options)) - start).norm().item()
    assert moved == pytest.approx(1e-3, rel=1e-3)


def test_accumulate_gives_the_gradient_of_the_whole_batch(train_here: Trainer, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    data = (torch.randn(20, 4, generator=generator).double(), torch.randn(20, 1, generator=generator).double())
    options: Problem = {"model": lambda: nn.Linear(4, 1).double(), "dataset": data, "batch_size": 10, "epochs": 3}
    whole = trained(train_here(**options, run_dir=tmp_path / "whole"))
    pieces = trained(train_here(**options, accumulate=3, run_dir=tmp_path / "pieces"))
    assert torch.allclose(whole, pieces, rtol=0, atol=1e-14)


def test_accumulate_computes_each_batch_in_that_many_pieces(train_here: Trainer) -> None:
    step = Watch(lambda model, batch: len(batch[0]))
    train_here(step=step, accumulate=3).join()
    assert step.seen == [3, 3, 2] * 12


def test_precision_bf16_computes_in_bf16_and_keeps_parameters_in_fp32(train_here: Trainer) -> None:
    step = Watch(lambda model, batch: model(batch[0]).dtype)
    run = train_here(step=step, precision="bf16")
    assert trained(run).dtype == torch.float32
    assert set(step.seen) == {torch.bfloat16}


def test_lr_scale_multiplies_the_learning_rate(train_here: Trainer) -> None:
    assert [epoch.learning_rate for epoch in train_here(lr_scale=0.5)] == [0.05]


def test_the_schedule_advances_with_every_batch(train_here: Trainer) -> None:
    optimizers: list[torch.optim.Optimizer] = []

    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        optimizers.append(torch.optim.SGD(parameters, lr=1.0))
        return optimizers[0]

    rates: list[float] = []

    def step(model: nn.Module, batch: Any) -> Any:
        # The rate of the step before: the schedule moves when the optimizer does.
        rates.append(optimizers[0].param_groups[0]["lr"])
        return model(batch[0]).square().mean()

    train_here(optimizer=make_optimizer, step=step, scheduler=halved_every_tick, batch_size=24, epochs=2).join()
    assert rates == [1.0, 1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625]


def halved_every_tick(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)


def test_threads_per_rank_are_what_torch_uses(train_here: Trainer) -> None:
    step = Watch(lambda model, batch: torch.get_num_threads())
    train_here(step=step, threads_per_rank=1).join()
    assert set(step.seen) == {1}


def test_rank_and_world_size_are_in_the_environment(train_here: Trainer) -> None:
    step = Watch(lambda model, batch: (os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]))
    train_here(step=step).join()
    assert set(step.seen) == {("0", "0", "1")}


# Windows


def test_a_given_anchor_is_the_length_of_every_window(train_here: Trainer, events: Events) -> None:
    run = train_here(anchor=3, speed_hints=[1])
    run.join()
    assert [plan["value"] for plan in events(run.run_dir, "plan")] == [[3]] * 4
    assert [window["batches"] for window in events(run.run_dir, "window")] == [3] * 4


def test_max_anchor_bounds_the_windows(train_here: Trainer, events: Events) -> None:
    run = train_here(max_anchor=4, speed_hints=[1])
    run.join()
    assert [plan["anchor"] for plan in events(run.run_dir, "plan")] == [4, 4, 4]


def test_one_rank_keeps_long_windows_since_it_has_nothing_to_average(train_here: Trainer, events: Events) -> None:
    run = train_here(epochs=4)
    run.join()
    assert events(run.run_dir, "anchor") == []
    assert {plan["anchor"] for plan in events(run.run_dir, "plan")} == {20}


def test_min_anchor_makes_the_windows_of_one_rank_longer(train_here: Trainer, events: Events) -> None:
    run = train_here(min_anchor=30)
    run.join()
    assert {plan["anchor"] for plan in events(run.run_dir, "plan")} == {30}


def test_what_makes_up_for_averaging_is_in_the_timeline_with_its_reason(train_here: Trainer, events: Events) -> None:
    run = train_here(lr_scale=2.0)
    run.join()
    (chosen,) = events(run.run_dir, "compensation")
    assert chosen["value"] == {"outer": "none", "learning rate follows ranks": False}
    assert chosen["reason"] == "lr_scale=2 was given"


# Callbacks


def test_callbacks_see_every_epoch_in_order(train_here: Trainer) -> None:
    seen: list[Any] = []
    train_here(
        epochs=2,
        epoch_start=lambda context: seen.append(("start", context.epoch, context.metrics)),
        epoch_end=lambda context: seen.append(("end", context.epoch, context.metrics.samples)),
    ).join()
    assert seen == [("start", 0, None), ("end", 0, 96), ("start", 1, None), ("end", 1, 96)]


def test_callbacks_get_model_optimizer_and_rank(train_here: Trainer) -> None:
    seen: list[outrider.EpochContext] = []
    train_here(epoch_end=seen.append).join()
    assert isinstance(seen[0].model, nn.Module)
    assert isinstance(seen[0].optimizer, torch.optim.SGD)
    assert (seen[0].rank, seen[0].is_main) == (0, True)


def test_epoch_end_may_stop_the_run(train_here: Trainer) -> None:
    run = train_here(epochs=5, epoch_end=lambda context: context.stop())
    assert [epoch.epoch for epoch in run.join().epochs] == [0]


def test_epoch_start_may_stop_the_run_before_the_epoch(train_here: Trainer) -> None:
    run = train_here(epochs=5, epoch_start=stop_before_epoch_2)
    assert [epoch.epoch for epoch in run.join().epochs] == [0, 1]


def stop_before_epoch_2(context: outrider.EpochContext) -> None:
    if context.epoch == 2:
        context.stop()


# Logged scalars and evaluation


def test_logged_scalars_are_weighted_by_samples(train_here: Trainer) -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        outrider.log("size", len(batch[0]))
        return model(batch[0]).square().mean()

    # One batch of 64 samples and one of 32.
    epoch = next(iter(train_here(step=step, batch_size=64)))
    assert epoch.logged["size"] == pytest.approx((64 * 64 + 32 * 32) / 96)


def test_logged_scalars_of_pieces_are_weighted_by_their_samples(train_here: Trainer) -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        outrider.log("size", len(batch[0]))
        return model(batch[0]).square().mean()

    epoch = next(iter(train_here(step=step, accumulate=3)))
    assert epoch.logged["size"] == pytest.approx((3 * 3 + 3 * 3 + 2 * 2) / 8)


def test_a_tensor_can_be_logged(train_here: Trainer) -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        loss = model(batch[0]).square().mean()
        outrider.log("twice", 2 * loss)
        return loss

    epoch = next(iter(train_here(step=step)))
    assert epoch.logged["twice"] == pytest.approx(2 * epoch.loss)


def test_logged_scalars_start_anew_each_epoch(train_here: Trainer) -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        loss = (model(batch[0]) - batch[1]).square().mean()
        outrider.log("loss", loss)
        return loss

    assert all(epoch.logged["loss"] == pytest.approx(epoch.loss) for epoch in train_here(step=step, epochs=3))


def test_a_step_that_logs_serves_as_evaluation_and_its_means_are_those_of_training(
    train_here: Trainer, problem: Problem
) -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        loss = (model(batch[0]) - batch[1]).square().mean()
        outrider.log("loss", loss)
        return loss

    for epoch in train_here(step=step, evaluate=step, eval_dataset=problem["dataset"], epochs=3):
        assert epoch.logged["loss"] == pytest.approx(epoch.loss)
        assert epoch.eval != pytest.approx(epoch.loss)


def test_log_outside_a_step_is_an_error() -> None:
    with pytest.raises(outrider.ConfigError) as caught:
        outrider.log("accuracy", 0.5)
    assert str(caught.value) == (
        "log('accuracy', ...) was called outside a step\nhint: call outrider.log inside the step function"
    )


def test_evaluation_is_the_mean_over_all_samples(train_here: Trainer, problem: Problem) -> None:
    inputs = torch.arange(1000.0).reshape(1000, 1)
    run = train_here(evaluate=lambda model, batch: batch[0].mean(), eval_dataset=(inputs,))
    assert [epoch.eval for epoch in run] == [pytest.approx(499.5)]


def test_evaluation_sees_the_model_in_evaluation_mode_without_gradients(train_here: Trainer, problem: Problem) -> None:
    seen: list[Any] = []

    def evaluate(model: nn.Module, batch: Any) -> float:
        seen.append((model.training, model(batch[0]).requires_grad))
        return 0.5

    step = Watch(lambda model, batch: model.training)
    train_here(step=step, evaluate=evaluate, eval_dataset=problem["dataset"], epochs=2).join()
    assert seen == [(False, False)] * 2
    assert set(step.seen) == {True}


def test_a_port_that_the_ranks_of_others_do_not_use_is_said(
    train_here: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    train_here(port=1234).join()
    used = os.environ["MASTER_PORT"]
    words = f"outrider: port=1234 is not used: the ranks were started with MASTER_PORT={used}"
    assert words in capsys.readouterr().err.splitlines()
