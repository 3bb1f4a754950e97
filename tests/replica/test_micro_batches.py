"""Micro-batches: the gradient of the whole batch, in pieces that fit; a step that runs out of memory is taken again."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import outrider
from outrider.average.gradients import GradientExchange
from outrider.average.overlap import Overlap
from outrider.average.transport.collective import Started
from outrider.data.sample_sequence import SampleSequence
from outrider.errors import ConfigError, StepError
from outrider.policy.effects import Decision
from outrider.replica.compiled import CompiledStep
from outrider.replica.micro_batch_search import find_micro_batch
from outrider.replica.micro_batches import MicroBatches, limit_of
from outrider.replica.out_of_memory import is_out_of_memory
from outrider.replica.recipe import Recipe
from outrider.replica.replica import Replica

CPU = torch.device("cpu")
DATA = torch.randn(24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def limited(model: nn.Module, batch: Tensor, *, fits: int) -> Tensor:
    """The loss, where no more samples than this fit; memory runs out in the middle of the forward pass."""
    random.random(), numpy.random.rand()
    loss = squares(model, batch)
    outrider.log("mean", batch.mean())
    if len(batch) > fits:
        raise out_of_memory()
    return loss


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, fits: int) -> Tensor:
        ctx.fits = fits
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if len(gradient) > ctx.fits:
            raise out_of_memory()
        return gradient, None


class LimitedBackward(nn.Module):
    """Memory runs out in the backward pass, between the second and the first layer."""

    def __init__(self, fits: int) -> None:
        super().__init__()
        self.first, self.second, self.fits = nn.Linear(3, 4), nn.Linear(4, 1), fits

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.second(_FailsInBackward.apply(self.first(inputs), self.fits))
        return out


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def make_odd_model() -> nn.Module:
    """BatchNorm's statistics and dropout's random state change in a forward pass."""
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)).double()


def make(**options: Any) -> Replica:
    defaults: dict[str, Any] = {
        "model": make_model,
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "step": squares,
        "dataset": DATA,
        "batch_size": 24,
        "policy": "cadence",
    }
    return Replica(Recipe(**{**defaults, **options}), device=CPU, rank=0, name="cpu")


def gradients(replica: Replica) -> list[Tensor]:
    found = [parameter.grad for parameter in replica.model.parameters()]
    return [gradient for gradient in found if gradient is not None]


def are_close(mine: list[Tensor], its: list[Tensor]) -> bool:
    return len(mine) == len(its) and all(
        torch.allclose(a, b, rtol=1e-13, atol=0) for a, b in zip(mine, its, strict=True)
    )


@given(samples=st.integers(1, 60), limit=st.integers(1, 70) | st.none(), accumulate=st.integers(1, 8))
def test_counts_hold_every_sample_and_never_exceed_the_limit(samples: int, limit: int | None, accumulate: int) -> None:
    counts = MicroBatches(limit=limit, accumulate=accumulate, batch_size=60).counts(samples)
    assert sum(counts) == samples
    assert max(counts) - min(counts) <= 1
    assert max(counts) <= (limit or samples)
    assert len(counts) >= min(accumulate, samples // 2)


@pytest.mark.parametrize("micro_batch", [1, 5, 7, 16, 24, 100])
def test_the_gradient_is_that_of_the_whole_batch(micro_batch: int) -> None:
    whole, cut = make(), make(micro_batch=micro_batch)
    whole.gradient(DATA, samples=24)
    cut.gradient(DATA, samples=24)
    assert are_close(gradients(whole), gradients(cut))
    assert cut.loss_sums.drain() == pytest.approx(whole.loss_sums.drain())


def test_a_step_that_runs_out_of_memory_is_taken_again_in_halves() -> None:
    told: list[Decision] = []
    whole, small = make(), make(step=partial(limited, fits=7))
    small.on_micro_batch = told.append
    whole.step(DATA, samples=24, at=0)
    small.step(DATA, samples=24, at=0)
    assert are_close(list(whole.model.parameters()), list(small.model.parameters()))
    assert told == [
        Decision("micro-batch", 6, "out of memory with 24 samples at once", {"step": 0, "tried": 24}),
    ]
    small.step(DATA, samples=24, at=24)
    assert len(told) == 1


def test_losses_and_logged_scalars_of_a_retaken_step_count_once() -> None:
    whole, small = make(step=partial(limited, fits=24)), make(step=partial(limited, fits=7))
    whole.step(DATA, samples=24, at=0)
    small.step(DATA, samples=24, at=0)
    assert small.loss_sums.drain() == pytest.approx(whole.loss_sums.drain())
    mine, its = small.logged_scalars.drain(), whole.logged_scalars.drain()
    assert mine["mean"] == pytest.approx(its["mean"])
    assert mine["mean"][1] == 24


def test_a_retaken_step_draws_and_counts_as_one_that_had_the_right_size_from_the_start() -> None:
    small = make(model=make_odd_model, step=partial(limited, fits=7))
    small.step(DATA, samples=24, at=0)
    drawn = (random.random(), numpy.random.rand(), torch.rand(3))
    right = make(model=make_odd_model, step=partial(limited, fits=7), micro_batch=6)
    right.step(DATA, samples=24, at=0)
    again = (random.random(), numpy.random.rand(), torch.rand(3))
    mine, its = small.model.state_dict(), right.model.state_dict()
    assert {name: torch.equal(value, its[name]) for name, value in mine.items()} == dict.fromkeys(mine, True)
    assert (drawn[0], drawn[1], drawn[2].tolist()) == (again[0], again[1], again[2].tolist())


def test_a_later_step_is_retaken_from_its_own_random_state() -> None:
    fits = [24]

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        loss = squares(model, batch)
        if len(batch) > fits[0]:
            raise out_of_memory()
        return loss

    small = make(model=make_odd_model, step=step)
    small.step(DATA, samples=24, at=0)
    fits[0] = 7
    small.step(DATA, samples=24, at=24)
    right = make(model=make_odd_model)
    right.step(DATA, samples=24, at=0)
    right.micro_batches.limit = 6
    right.step(DATA, samples=24, at=24)
    mine, its = small.model.state_dict(), right.model.state_dict()
    assert {name: torch.equal(value, its[name]) for name, value in mine.items()} == dict.fromkeys(mine, True)


def test_a_single_sample_that_does_not_fit_ends_with_what_would_help() -> None:
    with pytest.raises(StepError) as caught:
        make(step=partial(limited, fits=0)).step(DATA, samples=24, at=0)
    assert str(caught.value) == (
        "rank 0 (cpu), step 0: out of memory with a single sample\n"
        "hint: use a device with more memory, a smaller model or shorter samples, precision='bf16', or activation "
        "checkpointing (torch.utils.checkpoint) in the model"
    )


def test_a_batch_of_a_batch_sampler_that_does_not_fit_is_not_called_a_sample() -> None:
    sequence = SampleSequence(source=[[0, 1, 2]], has_batches=True)
    with pytest.raises(StepError) as caught:
        make(step=partial(limited, fits=2), batch_size=1, order=sequence, shuffle=False).step(DATA[:3], samples=1, at=0)
    assert str(caught.value) == (
        "rank 0 (cpu), step 0: out of memory with a batch of list, which is computed whole\n"
        "hint: let list make smaller batches, or use a device with more memory, a smaller model or shorter samples, "
        "precision='bf16', or activation checkpointing (torch.utils.checkpoint) in the model"
    )


def test_a_batch_that_cannot_be_cut_says_that_memory_ran_out() -> None:
    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return limited(model, batch[0], fits=7)

    with pytest.raises(StepError) as caught:
        make(step=step).step((DATA, torch.zeros(3, 3)), samples=24, at=0)
    assert caught.value.message == (
        "rank 0 (cpu), step 0: out of memory with 24 samples at once, and in micro-batches of 12: a batch of 24 "
        "samples cannot be cut into micro-batches: it has a tensor of shape (3, 3)"
    )


def test_what_fails_in_small_micro_batches_only_says_that_memory_ran_out() -> None:
    with pytest.raises(
        StepError, match=r"out of memory with 24 .* in micro-batches of 1: ValueError: Expected more than 1"
    ):
        make(model=make_odd_model, step=partial(limited, fits=1)).step(DATA, samples=24, at=0)


def test_other_errors_are_raised_as_they_are() -> None:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        raise ValueError("wrong")

    replica = make(step=step)
    with pytest.raises(StepError, match=r"^rank 0 \(cpu\), step 0: ValueError: wrong"):
        replica.step(DATA, samples=24, at=0)
    assert replica.micro_batches.limit is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            True,
        ),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."), True),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_what_out_of_memory_is(error: Exception, expected: bool) -> None:
    outer = StepError("a step")
    outer.__cause__ = error
    assert is_out_of_memory(outer) is expected


# The start of a sum while the backward pass is at work


class _Sums:
    """Keeps the tensors whose sums were begun."""

    def __init__(self) -> None:
        self.begun: list[Tensor] = []

    def start_sum_(self, tensor: Tensor) -> Started:
        self.begun.append(tensor.clone())
        return None  # type: ignore[return-value]  # nobody waits for it here


def test_sums_that_began_before_memory_ran_out_have_whole_gradients_and_the_rest_follows() -> None:
    replica = make(model=lambda: LimitedBackward(fits=100).double(), optimizer=partial(torch.optim.SGD, lr=0.0))
    exchange = GradientExchange(replica.arena, rank=0, world_size=2, num_facts=0, bucket_bytes=16)
    sums = _Sums()
    overlap = Overlap(exchange, sums)
    replica.gradient(DATA, samples=24, overlapped=lambda: overlap.backward(24))
    overlap.take_started()
    exchange.pack(24, [])
    expected = [wire.clone() for wire in exchange.wires]
    replica.model.fits = 7  # type: ignore[assignment]
    replica.gradient(DATA, samples=24, overlapped=lambda: overlap.backward(24))
    assert sums.begun
    assert len(sums.begun) < len(exchange.buckets)
    overlap.take_started()
    exchange.pack(24, [])
    for wire, whole in zip(exchange.wires, expected, strict=True):
        assert torch.allclose(wire, whole, rtol=1e-12)
    assert replica.micro_batches.limit == 6


def test_sums_begin_in_the_backward_pass_of_the_last_micro_batch() -> None:
    replica = make(model=lambda: LimitedBackward(fits=100).double(), micro_batch=8)
    exchange = GradientExchange(replica.arena, rank=0, world_size=2, num_facts=0, bucket_bytes=16)
    sums = _Sums()
    overlap = Overlap(exchange, sums)
    for _ in range(2):
        replica.gradient(DATA, samples=24, overlapped=lambda: overlap.backward(24))
        overlap.take_started()
        exchange.pack(24, [])
    begun = sums.begun
    assert len(begun) == len(exchange.buckets) - 1
    assert all(torch.equal(sent, bucket.wire) for sent, bucket in zip(begun, exchange.buckets, strict=False))


# Compiled steps, the search, and what is remembered


def test_a_compiled_step_is_compiled_for_the_new_size(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_sizes: list[int] = []

    def compiled(model: nn.Module, batch: Tensor) -> Tensor:
        compiled_sizes.append(len(batch))
        return limited(model, batch, fits=7)

    monkeypatch.setattr(torch, "compile", lambda step, **_: compiled)
    replica = make(step=partial(limited, fits=7))
    replica.compiled = CompiledStep(replica.recipe.step, samples=24)
    replica.step(DATA, samples=24, at=0)
    replica.step(DATA, samples=24, at=24)
    assert compiled_sizes == [24, 6, 6, 6, 6]


@pytest.mark.parametrize(
    ("fits", "largest", "size"), [(24, None, None), (23, 22, 12), (20, 19, 12), (7, 7, 6), (1, 1, 1)]
)
def test_the_search_finds_nearly_the_largest_size_and_leaves_a_margin(
    fits: int, largest: int | None, size: int | None
) -> None:
    replica = make(model=make_odd_model, step=partial(limited, fits=fits), optimizer=partial(torch.optim.Adam, lr=0.1))
    state = torch.get_rng_state()
    found = find_micro_batch(replica, DATA, samples=24)
    assert (found and found.value, found and found.details["largest"]) == (size, largest)
    assert torch.equal(torch.get_rng_state(), state)
    untouched = make(model=make_odd_model)
    mine, its = replica.model.state_dict(), untouched.model.state_dict()
    assert {name: torch.equal(value, its[name]) for name, value in mine.items()} == dict.fromkeys(mine, True)
    assert (replica.steps, replica.loss_sums.has_losses, len(replica.optimizer.state)) == (0, False, 0)


def test_the_search_counts_the_gradient_of_the_micro_batches_before() -> None:
    """Where a batch is cut, its gradient so far lies beside the activations."""

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        has_gradient = next(model.parameters()).grad is not None
        return limited(model, batch, fits=7 if has_gradient else 15)

    replica = make(step=step)
    found = find_micro_batch(replica, DATA, samples=24)
    assert found is not None
    assert found.details["largest"] == 7
    replica.on_micro_batch = lambda decision: pytest.fail(f"memory ran out after all: {decision}")
    replica.step(DATA, samples=24, at=0)


def test_the_search_holds_what_averages_allocate_later(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: held.append(size[0]) or empty(*size, **options))
    find_micro_batch(make(), DATA, samples=24, later_bytes=4321)
    assert 4321 in held


class _Graphs:
    """Captured steps whose memory is in the way of a step of another size."""

    num_warm_ups = 0

    def __init__(self) -> None:
        self.given_up: list[str] = []

    def give_up(self, reason: str) -> bool:
        self.given_up.append(reason)
        return len(self.given_up) == 1


def test_captured_steps_give_way_before_micro_batches_shrink() -> None:
    graphs = _Graphs()

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        return limited(model, batch, fits=24 if graphs.given_up else 7)

    replica = make(step=step)
    told: list[Decision] = []
    replica.on_micro_batch = told.append
    replica.captured = graphs  # type: ignore[assignment]
    replica.plain_step(DATA, samples=24, at=0)
    assert graphs.given_up == ["its memory is needed by steps of other sizes"]
    assert (told, replica.micro_batches.limit, replica.steps) == ([], None, 1)


def test_the_size_is_remembered_for_the_same_device_unless_one_is_given() -> None:
    replica = make(step=partial(limited, fits=7))
    replica.step(DATA, samples=24, at=0)
    same, other, given_one = make(), make(), make(micro_batch=12)
    other.name = "cuda:0"
    for one in (same, other, given_one):
        one.restore(replica.state())
    assert [one.micro_batches.limit for one in (same, other, given_one)] == [6, None, 12]


def test_one_size_per_rank() -> None:
    assert [limit_of((8, "auto"), rank) for rank in (0, 1)] == [8, None]
    with pytest.raises(ConfigError) as caught:
        make(micro_batch=(8, 4)).recipe.check_ranks(3)
    assert str(caught.value) == (
        "micro_batch has 2 values for 3 ranks\n"
        "hint: pass one value per device, in the order of devices, or one micro_batch for all"
    )


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "most", (8, 0), None])
def test_bad_sizes_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^micro_batch must be a whole number >= 1 or 'auto', got "):
        make(micro_batch=value)
