"""How steps run where no CUDA device is, and the parts of a captured step that need none."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from outrider.data import randomness
from outrider.data.feed import make_feed
from outrider.data.order import in_order
from outrider.data.packed_batch import PackedBatch, as_packed_batch, packed_batch_of, unpacked, whole
from outrider.errors import ConfigError
from outrider.policy.effects import Batch, Decision
from outrider.replica import compiled
from outrider.replica.capturable_optimizer import OptimizerForm, Rates, hyperparameters, make_capturable
from outrider.replica.capture import Uncapturable
from outrider.replica.execution import choose_execution
from outrider.replica.logged_scalars import LoggedScalars
from outrider.replica.loss_sums import LossSums
from outrider.replica.recipe import Recipe
from outrider.replica.replica import Replica
from outrider.replica.snapshot import Snapshot, kept_between_steps
from outrider.replica.trial_steps import FormatChoice, agree, choose_memory_format

CPU = torch.device("cpu")
DATA = torch.arange(12.0).view(6, 2)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))


def recipe(**options: Any) -> Recipe:
    defaults: dict[str, Any] = {
        "model": model,
        "optimizer": partial(torch.optim.Adam, lr=0.1),
        "step": loss_of,
        "dataset": DATA,
        "batch_size": 3,
        "policy": "cadence",
    }
    return Recipe(**{**defaults, **options})


def replica(**options: Any) -> Replica:
    return Replica(recipe(**options), device=CPU, rank=0, name="cpu@0.4")


def chosen(made: Replica) -> Decision:
    return choose_execution(made, lambda: whole(DATA[:3]), samples=3, on_decision=lambda decision: None)


@pytest.mark.parametrize("execution", ["auto", "graph"])
def test_without_a_cuda_device_steps_run_eagerly_and_the_reason_is_said(execution: str) -> None:
    made = replica(execution=execution)
    assert chosen(made) == Decision("execution", "eager", "a CUDA graph needs a CUDA device, this rank has cpu@0.4")
    assert made.captured is None


def test_eager_was_given() -> None:
    assert chosen(replica(execution="eager")) == Decision("execution", "eager", "execution=eager was given")


@pytest.mark.parametrize("execution", ["auto", "graph", "eager"])
def test_the_choice_changes_no_number_on_a_cpu(execution: str) -> None:
    made, plain = replica(execution=execution), replica()
    torch.manual_seed(5)
    chosen(made)
    made.step(whole(DATA[:3]), samples=3, at=0)
    torch.manual_seed(5)
    plain.step(DATA[:3], samples=3, at=0)
    assert all(torch.equal(flat, plain.arena.flats[dtype]) for dtype, flat in made.arena.flats.items())


def test_an_unknown_execution_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="unknown execution 'graphs'") as caught:
        recipe(execution="graphs")
    assert caught.value.hint == "did you mean 'graph'?"


def test_an_option_that_is_neither_a_flag_nor_auto_is_refused() -> None:
    with pytest.raises(ConfigError, match="tf32 must be True, False or 'auto', got 'yes'"):
        recipe(tf32="yes")


# Compilation


def test_a_step_that_cannot_be_compiled_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(step: Any, **options: Any) -> Callable[..., Tensor]:
        def fail(*arguments: Any) -> Tensor:
            raise RuntimeError("no compiler found\nmore lines")

        return fail

    monkeypatch.setattr(compiled.torch, "compile", no_compiler)
    made = replica(execution="compile")
    decision = chosen(made)
    assert (decision.value, made.compiled) == ("eager", None)
    assert decision.reason == ("the step cannot be compiled: rank 0 (cpu@0.4), step 1: RuntimeError: no compiler found")


def test_a_compiled_step_is_used_for_full_batches_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.torch, "compile", lambda step, **options: lambda *arguments: 2 * step(*arguments))
    made = replica(execution="compile", model=lambda: nn.Linear(2, 1))
    assert chosen(made).value == "compile"
    assert made.compiled is not None
    assert made.compiled.for_samples(2) is loss_of
    assert made.compiled.for_samples(3) is not loss_of


def test_trying_a_compiled_step_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.torch, "compile", lambda step, **options: step)
    made, untouched = replica(execution="compile"), replica()
    chosen(made)
    assert all(torch.equal(flat, untouched.arena.flats[dtype]) for dtype, flat in made.arena.flats.items())
    assert (made.steps, made.optimizer.state, made.loss_sums.drain()) == (0, {}, (0.0, 0))


def test_shares_of_a_batch_are_not_compiled() -> None:
    assert chosen(replica(execution="compile", policy="balanced")).reason == (
        "the step is not compiled: the shares of a batch change their sizes"
    )


def test_whole_batches_are_compiled_where_steps_are_not_always_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.torch, "compile", lambda step, **options: step)
    decision = chosen(replica(execution="compile", policy="auto"))
    assert decision.value == "compile"
    assert decision.reason.endswith("parts of shared batches run uncompiled")


# Packed batches


def test_a_packed_batch_of_tensors_on_their_device_holds_row_numbers_only() -> None:
    feed = make_feed(DATA, device=CPU, seed=0)
    feed.start_epoch(torch.tensor([5, 4, 3, 2, 1, 0]), 0)
    packed_batch = packed_batch_of(feed, Batch(1, 2))
    assert packed_batch.inputs.tolist() == [4, 3]
    assert torch.equal(packed_batch.batch(), feed.fetch(Batch(1, 2)))


def test_a_packed_batch_of_an_augmented_batch_holds_its_keys_too() -> None:
    feed = make_feed(DATA, device=CPU, seed=0, augment=lambda batch, keys: batch + (keys % 7)[:, None])
    feed.start_epoch(in_order(6), 0)
    packed_batch = packed_batch_of(feed, Batch(2, 3))
    assert [tensor.dtype for tensor in packed_batch.inputs] == [torch.int64, torch.int64]
    assert torch.equal(packed_batch.batch(), feed.fetch(Batch(2, 3)))


def test_a_feed_without_packed_batches_gives_whole_batches() -> None:
    feed = make_feed([torch.ones(2), torch.zeros(2)], device=CPU, seed=0)
    feed.start_epoch(in_order(2), 0)
    assert torch.equal(packed_batch_of(feed, Batch(0, 2)).inputs, feed.fetch(Batch(0, 2)))


def test_a_batch_is_a_whole_packed_batch_and_back() -> None:
    packed_batch = PackedBatch(inputs=3, unpack=lambda value: value + 1)
    assert as_packed_batch(packed_batch) is packed_batch
    assert (unpacked(packed_batch), unpacked(as_packed_batch(7))) == (4, 7)


# Learning rates and forms of optimizers


def test_the_optimizer_reads_the_written_rates_only_while_they_are_installed() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    rates = Rates(optimizer, CPU)
    rates.write(2.0)
    with rates.installed():
        assert optimizer.param_groups[0]["lr"].item() == 1.0
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_an_optimizer_without_a_capturable_form_is_named() -> None:
    optimizer = torch.optim.Adagrad([nn.Parameter(torch.ones(1))])
    with pytest.raises(Uncapturable, match=r"^Adagrad has no form in torch that can be captured$"):
        make_capturable(optimizer, CPU)


def test_an_optimizer_goes_back_to_the_form_it_was_given_in() -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))])
    before = hyperparameters(optimizer)
    form = OptimizerForm(optimizer)
    make_capturable(optimizer, CPU)
    assert hyperparameters(optimizer) != before
    form.restore()
    assert hyperparameters(optimizer) == before


def test_rates_are_not_among_what_a_capture_bakes_in() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    before = hyperparameters(optimizer)
    optimizer.param_groups[0]["lr"] = 0.1
    assert hyperparameters(optimizer) == before
    optimizer.param_groups[0]["momentum"] = 0.9
    assert hyperparameters(optimizer) != before


def test_a_checkpoint_of_a_capturable_optimizer_is_restored_in_the_own_form() -> None:
    made, other = replica(), replica()
    other.step(DATA[:3], samples=3, at=0)
    state = other.state()
    for group in state["optimizer"]["param_groups"]:
        group["capturable"] = True
    made.restore(state)
    assert made.optimizer.param_groups[0]["capturable"] is False
    made.step(DATA[:3], samples=3, at=3)


# Snapshots


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1)
        self.calls = 0
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.kept = self.inner(x).detach()
        return self.inner(x)


def test_a_snapshot_brings_everything_back() -> None:
    made, untouched = replica(), replica()
    snapshot = Snapshot(made)
    made.step(DATA[:3], samples=3, at=0)
    snapshot.restore()
    made.step(DATA[:3], samples=3, at=0)
    torch.manual_seed(made.recipe.seed)
    untouched = replica()
    untouched.step(DATA[:3], samples=3, at=0)
    assert all(torch.equal(flat, untouched.arena.flats[dtype]) for dtype, flat in made.arena.flats.items())
    assert made.steps == 1


def test_a_snapshot_brings_attributes_of_modules_back() -> None:
    made = replica(model=Counting)
    snapshot = Snapshot(made)
    made.step(DATA[:3], samples=3, at=0)
    snapshot.restore()
    assert (made.model.calls, made.model.kept) == (0, None)


def test_what_a_model_keeps_between_steps_is_seen() -> None:
    module = Counting()
    module(DATA)
    before = kept_between_steps(module)
    module(DATA)
    after = kept_between_steps(module)
    assert [name for name, kept in after.items() if not kept.is_same(before[name])] == ["calls", "kept"]


@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand(1), lambda: numpy.random.rand()])
def test_a_draw_on_the_host_is_seen_and_undone(draw: Callable[[], Any]) -> None:
    before = randomness.capture()
    assert randomness.capture().equals(before)
    draw()
    assert not randomness.capture().equals(before)
    randomness.restore(before)
    assert randomness.capture().equals(before)


# Sums that count on with every replay


def test_a_captured_step_counts_when_it_is_replayed_and_not_before() -> None:
    loss_sums = LossSums(CPU)
    loss_sums.add(torch.tensor(2.0), 4, 0)
    loss_sums.captured(4)
    loss_sums.counted_on(4)
    loss_sums.counted_on(4)
    assert loss_sums.drain() == (8.0, 8)


def test_what_was_logged_in_a_capture_is_taken_back() -> None:
    book = LoggedScalars()
    book.add("loss", 1.0, 2)
    before = book.entries()
    book.add("loss", 5.0, 3)
    book.add("other", 1.0, 3)
    assert book.take_back(before) == {"loss": 3.0, "other": 3.0}
    assert book.drain() == {"loss": (2.0, 2.0)}


# Memory formats


def test_a_cpu_keeps_its_memory_format() -> None:
    assert choose_memory_format(replica(), DATA[:3]) == FormatChoice(
        value="contiguous", reason="cpu@0.4 has no tensor cores"
    )


def test_a_memory_format_that_was_given_stands() -> None:
    made = replica(model=lambda: nn.Conv2d(2, 3, 3), memory_format="channels_last")
    assert made.model.weight.is_contiguous(memory_format=torch.channels_last)
    assert choose_memory_format(made, None).reason == "memory_format=channels_last was given"


def test_ranks_of_two_minds_stay_contiguous() -> None:
    last = FormatChoice(value="channels_last", reason="convolutions over images on tensor cores")
    plain = FormatChoice(value="contiguous", reason="cpu has no tensor cores")
    assert agree([last, last]) == last
    for choices in ([last, plain], [plain, last]):
        assert agree(choices) == FormatChoice(
            value="contiguous", reason="for rank 1 beside rank 0: cpu has no tensor cores"
        )


class _Graphs:
    """Captured steps that say which of their two gradients was wanted."""

    num_warm_ups = 0

    def __init__(self) -> None:
        self.computed: list[str] = []

    def gradient(self, packed_batch: PackedBatch, *, samples: int) -> None:
        self.computed.append("captured")

    def eager_gradient(self, packed_batch: PackedBatch, *, samples: int, overlapped: Any) -> None:
        with overlapped():
            self.computed.append("eager")


@pytest.mark.parametrize(("execution", "can_overlap"), [("auto", True), ("graph", False)])
def test_gradients_whose_sums_overlap_with_backward_are_not_captured(execution: str, can_overlap: bool) -> None:
    made, graphs = replica(execution=execution), _Graphs()
    made.captured = graphs  # type: ignore[assignment]
    # What was asked for is done: with execution="graph" sums do not overlap.
    assert made.can_overlap is can_overlap
    made.gradient(DATA[:3], samples=3)
    made.gradient(DATA[:3], samples=3, overlapped=contextlib.nullcontext)
    assert graphs.computed == ["captured", "eager"]
