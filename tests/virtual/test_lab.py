"""The lab against plain loops: what each policy promises about the mathematics."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from outrider.average.outer import Outer
from outrider.data.order import shuffled
from outrider.policy.effects import Batch
from outrider.replica.recipe import Recipe
from outrider.virtual.lab import Bench, LabRun, train
from outrider.virtual.lab_replicas import ReplicaWork

SIZE, BATCH = 240, 12


def data(dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SIZE, 6, generator=generator, dtype=dtype)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).to(dtype)


def step(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def correct(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).double().mean()


def recipe(**options: object) -> Recipe:
    basics: dict[str, object] = {
        "model": make_model,
        "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "step": step,
        "dataset": data(),
        "batch_size": BATCH,
        "epochs": 1,
        "seed": 5,
        "policy": "cadence",
    }
    return Recipe(**{**basics, **options})  # type: ignore[arg-type]


def flat(run: LabRun, rank: int = 0) -> torch.Tensor:
    return torch.cat([tensor.flatten().double() for tensor in run.state_dict(rank).values()])


def plain_loop(*, epochs: int = 1, batch_size: int = BATCH, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    torch.manual_seed(5)
    model = make_model(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, labels = data(dtype).tensors
    for epoch in range(epochs):
        for indices in shuffled(SIZE, seed=5, epoch=epoch).split(batch_size):
            optimizer.zero_grad()
            step(model, (inputs[indices], labels[indices])).backward()
            optimizer.step()
    return torch.cat([tensor.flatten().double() for tensor in model.state_dict().values()])


@pytest.mark.parametrize("policy", ["cadence", "async", "sync", "balanced"])
def test_one_rank_equals_a_plain_loop_bit_for_bit(policy: str) -> None:
    run = train(
        recipe(policy=policy, epochs=2, model=partial(make_model, torch.float32), dataset=data(torch.float32)),
        Bench(speeds=(1.0,)),
    )
    assert torch.equal(flat(run), plain_loop(epochs=2, dtype=torch.float32))


@pytest.mark.parametrize("speeds", [(1.0, 0.4), (1.0, 0.7, 0.15)])
def test_balanced_equals_one_device_with_the_whole_batch(speeds: tuple[float, ...]) -> None:
    run = train(recipe(policy="balanced"), Bench(speeds=speeds))
    assert run.work.replicas[0].steps == 20
    assert len(set(run.samples_by_rank)) > 1
    assert (flat(run) - plain_loop()).abs().max() < 1e-9


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda tick: 1 / (1 + 0.05 * tick))


@pytest.mark.slow
def test_balanced_equals_one_device_where_two_similar_ranks_work_alone_in_turn() -> None:
    options = {"optimizer": adam, "scheduler": falling, "policy": "balanced", "epochs": 40}
    run = train(recipe(**options), Bench(speeds=(0.9, 1.0), average_cost=0.7))
    whole = train(recipe(**options), Bench(speeds=(1.0,)))
    assert [decision.value for decision in run.decisions if decision.kind == "alone"] == [1, 0, 1]
    assert (flat(run, 0) - flat(whole)).abs().max() < 1e-9
    assert torch.equal(flat(run, 0), flat(run, 1))


@pytest.mark.parametrize("fast", [0, 1])
def test_balanced_equals_one_device_where_one_rank_works_alone(fast: int) -> None:
    speeds = (1.0, 0.1) if fast == 0 else (0.1, 1.0)
    options = {"optimizer": adam, "scheduler": falling, "policy": "balanced", "epochs": 4}
    run = train(recipe(**options), Bench(speeds=speeds, average_cost=3.0))
    whole = train(recipe(**options), Bench(speeds=(1.0,)))
    assert [decision.value for decision in run.decisions if decision.kind == "alone"] == [fast]
    assert (flat(run, 0) - flat(whole)).abs().max() < 1e-9
    assert torch.equal(flat(run, 0), flat(run, 1))
    moments = [
        [state["exp_avg_sq"].flatten() for state in replica.optimizer.state.values()] for replica in run.work.replicas
    ]
    assert torch.equal(torch.cat(moments[0]), torch.cat(moments[1]))
    rates = [replica.learning_rate for replica in (*run.work.replicas, *whole.work.replicas)]
    assert len(set(rates)) == 1


def test_sync_equals_one_device_with_all_batches_together() -> None:
    run = train(recipe(policy="sync"), Bench(speeds=(1.0, 0.4)))
    assert (flat(run) - plain_loop(batch_size=2 * BATCH)).abs().max() < 1e-9


@pytest.mark.parametrize("policy", ["sync", "balanced", "cadence", "async"])
def test_all_ranks_end_with_the_same_bits(policy: str) -> None:
    run = train(recipe(policy=policy, epochs=2), Bench(speeds=(1.0, 0.4, 0.3), average_cost=0.7))
    assert torch.equal(flat(run, 0), flat(run, 1))
    assert torch.equal(flat(run, 0), flat(run, 2))


@pytest.mark.parametrize("policy", ["sync", "balanced", "cadence", "async"])
def test_a_run_can_be_repeated_bit_for_bit(policy: str) -> None:
    first, second = (
        train(recipe(policy=policy, epochs=2, evaluate=correct, eval_dataset=data()), Bench(speeds=(1.0, 0.4)))
        for _ in range(2)
    )
    assert torch.equal(flat(first), flat(second))
    assert first.points == second.points


def test_async_keeps_every_local_step(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = {0: 0.0, 1: 0.0}
    plain_step = ReplicaWork.step

    def watched(work: ReplicaWork, rank: int, batch: Batch, at: int) -> None:
        weight = work.replicas[rank].model[0].weight
        before = weight.detach().clone()
        plain_step(work, rank, batch, at)
        moved[rank] += (weight.detach() - before).sum().item() * batch.count

    monkeypatch.setattr(ReplicaWork, "step", watched)
    # Equal windows, so every displacement has the same weight per sample, and the sum of all steps is what remains.
    run = train(
        recipe(policy="async", anchor=2, shares=(0.5, 0.5), outer=Outer(), epochs=1, batch_size=10),
        Bench(speeds=(1.0, 1.0), average_cost=1.5),
    )
    torch.manual_seed(5)
    start = make_model()[0].weight.sum().item()  # type: ignore[index]
    travelled = run.state_dict()["0.weight"].sum().item() - start
    assert run.averages > 3
    assert travelled == pytest.approx((moved[0] + moved[1]) / (10 * 2), rel=1e-9)


def test_time_to_target_counts_virtual_time() -> None:
    run = train(
        recipe(policy="cadence", epochs=3, evaluate=correct, eval_dataset=data()),
        Bench(speeds=(1.0,)),
        points_per_epoch=2,
    )
    assert [point.time for point in run.points] == [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]
    assert run.time_to(0.0) == 10.0
    assert run.time_to(1.01) is None


def test_two_unequal_devices_take_a_third_less_time_than_one() -> None:
    solo = train(recipe(epochs=3), Bench(speeds=(1.0,)))
    both = train(recipe(epochs=3, policy="async"), Bench(speeds=(1.0, 0.4)))
    assert both.points[-1].time < solo.points[-1].time / 1.25


def test_the_outer_step_moves_further_along_the_average() -> None:
    plain = train(recipe(policy="cadence", anchor=2, outer=Outer()), Bench(speeds=(1.0, 0.4)))
    pushed = train(
        recipe(policy="cadence", anchor=2, outer=Outer(kind="nesterov", momentum=0.5)), Bench(speeds=(1.0, 0.4))
    )
    assert pushed.points[-1].loss < plain.points[-1].loss


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_what_is_evaluated_and_handed_out_is_the_average_and_not_what_lies_ahead_of_it(policy: str) -> None:
    outer = Outer(kind="nesterov", momentum=0.5)
    evaluated = recipe(policy=policy, outer=outer, epochs=2, evaluate=sum_of_parameters, eval_dataset=data())
    run = train(evaluated, Bench(speeds=(1.0, 0.4)))
    model, exchange = run.work.replicas[0].model, run.work.exchanges[0]
    at_end = sum_of_parameters(model, None)
    velocity = sum(part.sum().item() for part in exchange.state_dict()["velocity"].values())
    assert run.points[-1].eval == pytest.approx(at_end)
    assert abs(velocity) > 1e-3
    run.work.move_to_lookahead()
    assert sum_of_parameters(model, None) == pytest.approx(at_end + 0.5 * velocity, abs=1e-5)


def sum_of_parameters(model: nn.Module, batch: object) -> float:
    return sum(parameter.sum().item() for parameter in model.parameters())


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_averaged_optimizer_state_is_the_same_on_all_ranks(policy: str) -> None:
    run = train(recipe(policy=policy, average_optimizer=True, epochs=2), Bench(speeds=(1.0, 0.4)))
    first, second = (replica.optimizer.state_dict()["state"] for replica in run.work.replicas)
    for index, state in first.items():
        assert torch.equal(state["momentum_buffer"], second[index]["momentum_buffer"])


def run_apart(**options: object) -> LabRun:
    """Steps far too large for this model: between averages the ranks go their own ways, further each time."""
    diverging = recipe(
        policy="cadence",
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        model=lambda: nn.Linear(6, 2).double(),
        step=lambda model, batch: -(model(batch[0]) ** 2).mean().clamp(max=1e30),
        drift_threshold=0.05,
        epochs=4,
        batch_size=2,
        **options,
    )
    return train(diverging, Bench(speeds=(1.0, 0.8)))


def test_the_guard_acts_when_replicas_run_apart() -> None:
    run = run_apart()
    shrunk = [decision for decision in run.decisions if decision.kind == "anchor" and "guard" in decision.reason]
    assert any(decision.kind == "guard" for decision in run.decisions)
    assert shrunk
    assert shrunk[0].details["to"] < shrunk[0].details["from"]


def test_without_the_guard_the_same_run_is_left_alone() -> None:
    run = run_apart(guard=False)
    assert not [decision for decision in run.decisions if decision.kind == "guard"]


@pytest.mark.parametrize("policy", ["balanced", "auto", "sync"])
def test_shared_steps_clip_the_gradient_of_the_whole_batch(policy: str) -> None:
    """As one device does, and not each rank its part of the batch."""

    def trained(*speeds: float, batch_size: int) -> dict[str, torch.Tensor]:
        options: dict[str, object] = {"max_grad_norm": 0.05, "batch_size": batch_size}
        return train(recipe(policy=policy, **options), Bench(speeds=speeds)).state_dict()

    one = trained(1.0, batch_size=2 * BATCH)
    two = trained(1.0, 0.5, batch_size=BATCH if policy == "sync" else 2 * BATCH)
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("policy", ["sync", "balanced", "cadence", "async"])
def test_a_layer_thawed_between_two_segments_takes_part(policy: str) -> None:
    thawed = thawing_recipe(policy, thaws=True)
    run, frozen = (train(recipe, Bench(speeds=(1.0, 0.5))) for recipe in (thawed, thawing_recipe(policy, thaws=False)))
    first, second = (run.state_dict(rank) for rank in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["0.weight"], frozen.state_dict()["0.weight"])
    assert run.work.replicas[0].arena.frozen == []
    assert len(frozen.work.replicas[0].arena.frozen) == 2


def thawing_recipe(policy: str, *, thaws: bool) -> Recipe:
    """The lower layer is frozen; each replica thaws its own in its first step, if at all."""
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(5))

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        model[0].requires_grad_(False)
        return model

    def step(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if thaws:
            model[0].requires_grad_(True)
        return (model(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    return Recipe(
        model=make,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        step=step,
        dataset=(inputs,),
        batch_size=8,
        epochs=3,
        policy=policy,
        seed=1,
    )
