"""Captured steps compute what eager ones do, on a CUDA device; what cannot be captured says why and runs eagerly."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import outrider
from outrider.bench.datasets.cifar10 import crop_and_flip, normalised
from outrider.bench.models.image_models import resnet
from outrider.data.feed import Feed, make_feed
from outrider.data.order import shuffled
from outrider.data.packed_batch import packed_batch_of
from outrider.policy.effects import Batch, Decision
from outrider.replica.execution import choose_execution
from outrider.replica.recipe import Recipe
from outrider.replica.replica import Replica
from outrider.replica.state_transfer import pack, take_over

CUDA = torch.device("cuda:0")
BATCH = 32
NUM_SAMPLES = 1_024


def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    pictures = torch.randint(0, 256, (NUM_SAMPLES, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return pictures, torch.randint(0, 10, (NUM_SAMPLES,), generator=generator)


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(NUM_SAMPLES, 20, generator=generator), torch.randint(0, 5, (NUM_SAMPLES,), generator=generator)


def mlp(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 5))


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def recipe(**options: Any) -> Recipe:
    defaults: dict[str, Any] = {
        "model": mlp,
        "optimizer": partial(torch.optim.Adam, lr=1e-2),
        "step": loss_of,
        "dataset": rows(),
        "batch_size": BATCH,
        "execution": "graph",
    }
    return Recipe(**{**defaults, **options})


class Trained:
    """A replica with its feed, stepping through an epoch of resident data."""

    def __init__(self, recipe: Recipe, *, execution: str = "graph") -> None:
        self.replica = Replica(recipe, device=CUDA, rank=0, name="cuda:0")
        self.feed: Feed = make_feed(recipe.dataset, device=CUDA, seed=0, augment=recipe.augment)
        self.feed.start_epoch(shuffled(NUM_SAMPLES, seed=0, epoch=0), 0)
        self.later: list[Decision] = []
        self.decision: Decision | None = None
        if execution == "graph":
            self.decision = choose_execution(
                self.replica,
                lambda: packed_batch_of(self.feed, Batch(0, BATCH)),
                samples=BATCH,
                on_decision=self.later.append,
            )

    def steps(self, number: int, *, count: int = BATCH) -> Trained:
        for step in range(number):
            start = step * BATCH % (NUM_SAMPLES - BATCH)
            packed_batch = packed_batch_of(self.feed, Batch(start, count))
            self.replica.step(packed_batch, samples=count, at=self.replica.steps * BATCH)
        return self

    def shared_steps(self, number: int) -> Trained:
        for step in range(number):
            start = step * BATCH % (NUM_SAMPLES - BATCH)
            self.replica.gradient(packed_batch_of(self.feed, Batch(start, BATCH)), samples=BATCH)
            self.replica.update(at=self.replica.steps * BATCH)
        return self

    @property
    def num_graphs(self) -> int:
        return 0 if self.replica.captured is None else self.replica.captured.num_graphs

    @property
    def state(self) -> Tensor:
        flats = [flat.double() for flat in self.replica.arena.flats.values()]
        return torch.cat([*flats, *(tensor.double().flatten() for tensor in self.replica.arena.integers)])


def distance(left: Trained, right: Trained) -> float:
    return float((left.state - right.state).norm() / left.state.norm())


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "sgd with dampening": partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.5),
    "adam": partial(torch.optim.Adam, lr=1e-3),
    "adam, foreach": partial(torch.optim.Adam, lr=1e-3, foreach=True),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3),
    "nadam": partial(torch.optim.NAdam, lr=1e-3),
    "radam": partial(torch.optim.RAdam, lr=1e-3),
    "adamax": partial(torch.optim.Adamax, lr=1e-3),
    "adadelta": partial(torch.optim.Adadelta, lr=0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fifty_captured_steps_end_where_eager_ones_do(name: str) -> None:
    wanted = recipe(optimizer=OPTIMIZERS[name], scheduler=schedule, max_grad_norm=0.5)
    captured, eager = Trained(wanted).steps(50), Trained(wanted, execution="eager").steps(50)
    assert captured.num_graphs == 1
    assert distance(captured, eager) < 1e-4


def test_shared_steps_and_whole_ones_may_take_turns_while_captured() -> None:
    wanted = recipe(scheduler=schedule)
    captured, eager = Trained(wanted), Trained(wanted, execution="eager")
    for trained in (captured, eager):
        trained.shared_steps(12).steps(12).shared_steps(12)
    assert captured.num_graphs == 3
    assert distance(captured, eager) < 1e-4


def test_a_captured_replica_takes_over_where_another_stands() -> None:
    worked, rested = (Trained(recipe(scheduler=schedule)).shared_steps(12) for _ in range(2))
    worked.steps(12)
    rested.replica.model.load_state_dict(worked.replica.model.state_dict())
    take_over(rested.replica, pack(worked.replica), at=23 * BATCH)
    num_graphs = rested.num_graphs
    for trained in (worked, rested):
        trained.shared_steps(6)
    assert rested.num_graphs == num_graphs
    assert distance(worked, rested) < 1e-6


def loss_of_images(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(normalised(batch[0])), batch[1])


RESNET: dict[str, Any] = {
    "model": resnet,
    "step": loss_of_images,
    "optimizer": partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=1e-4),
    "dataset": images(),
    "augment": crop_and_flip,
    "max_grad_norm": 1.0,
}


def test_a_captured_resnet_ends_where_an_eager_one_does() -> None:
    captured, eager = Trained(recipe(**RESNET)).steps(50), Trained(recipe(**RESNET), execution="eager").steps(50)
    assert captured.num_graphs == 1
    assert distance(captured, eager) < 2e-2  # TF32 in convolutions: two eager runs differ as much
    counters = captured.replica.arena.integers
    assert [int(counter) for counter in counters] == [50] * len(counters)


def test_a_captured_resnet_in_bf16_and_channels_last_learns_the_same() -> None:
    wanted = recipe(**RESNET, precision="bf16", memory_format="channels_last")
    captured, eager = Trained(wanted).steps(30), Trained(wanted, execution="eager").steps(30)
    assert captured.num_graphs == 1
    assert captured.replica.loss_sums.mean_so_far() == pytest.approx(eager.replica.loss_sums.mean_so_far(), rel=0.02)


def test_dropout_draws_the_same_numbers_as_in_eager_steps() -> None:
    wanted = recipe(model=partial(mlp, dropout=0.5))
    captured, eager = Trained(wanted).steps(50), Trained(wanted, execution="eager").steps(50)
    assert captured.num_graphs == 1
    assert distance(captured, eager) < 1e-4


def test_a_rehearsal_leaves_no_trace() -> None:
    wanted = recipe(model=partial(mlp, dropout=0.5))
    rehearsed, untouched = Trained(wanted), Trained(wanted, execution="eager")
    assert torch.equal(rehearsed.state, untouched.state)
    assert rehearsed.replica.optimizer.state == {}
    assert rehearsed.replica.steps == 0
    assert rehearsed.replica.loss_sums.drain() == (0.0, 0)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_shared_steps_are_captured_in_two_parts(name: str) -> None:
    wanted = recipe(optimizer=OPTIMIZERS[name], scheduler=schedule, policy="sync")
    captured, eager = Trained(wanted).shared_steps(50), Trained(wanted, execution="eager").shared_steps(50)
    assert captured.num_graphs == 2
    assert distance(captured, eager) < 1e-4


def test_another_batch_size_gets_a_graph_when_it_comes_again() -> None:
    trained = Trained(recipe()).steps(4)
    trained.steps(1, count=7)
    assert trained.num_graphs == 1
    trained.steps(2, count=7)
    assert trained.num_graphs == 2
    eager = Trained(recipe(), execution="eager").steps(4).steps(1, count=7).steps(2, count=7)
    assert distance(trained, eager) < 1e-4


def test_pieces_of_a_batch_are_captured_together() -> None:
    wanted = recipe(accumulate=4)
    captured, eager = Trained(wanted).steps(20), Trained(wanted, execution="eager").steps(20)
    assert captured.num_graphs == 1
    assert distance(captured, eager) < 1e-4


def test_losses_and_logged_scalars_count_every_replay() -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        loss = loss_of(model, batch)
        outrider.log("double", 2 * loss)
        return loss

    captured, eager = Trained(recipe(step=step)).steps(20), Trained(recipe(step=step), execution="eager").steps(20)
    assert captured.num_graphs == 1
    loss_sum, samples = captured.replica.loss_sums.drain()
    assert (loss_sum, samples) == (pytest.approx(eager.replica.loss_sums.drain()[0], rel=1e-4), 20 * BATCH)
    logged, weight = captured.replica.logged_scalars.drain()["double"]
    assert (logged, weight) == (pytest.approx(2 * loss_sum, rel=1e-4), 20 * BATCH)


def test_a_loss_that_is_not_finite_is_found_with_its_step() -> None:
    inputs, labels = rows()
    inputs[320:] = float("nan")
    trained = Trained(recipe())
    trained.feed = make_feed((inputs, labels), device=CUDA, seed=0)
    trained.feed.start_epoch(torch.arange(NUM_SAMPLES), 0)
    with pytest.raises(outrider.StepError, match=r"rank 0 \(cuda:0\), step 10: the loss is not finite"):
        trained.steps(20).replica.check_loss()


class Recurrent(nn.Module):
    """Rows of 20 as sequences of 5."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 32, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.lstm(x.unflatten(1, (5, 4)))
        logits: Tensor = self.head(outputs[:, -1])
        return logits


def test_an_lstm_with_dropout_is_captured() -> None:
    trained = Trained(recipe(model=Recurrent)).steps(20)
    assert trained.decision is not None
    assert (trained.decision.value, trained.num_graphs) == ("graph", 1)


def test_the_factor_on_the_rate_reaches_a_captured_step() -> None:
    wanted = recipe(optimizer=partial(torch.optim.SGD, lr=0.01))
    captured, eager = Trained(wanted).steps(5), Trained(wanted, execution="eager").steps(5)
    captured.replica.rate_factor = eager.replica.rate_factor = 3.0
    assert distance(captured.steps(10), eager.steps(10)) < 1e-5
    assert captured.replica.optimizer.param_groups[0]["lr"] == 0.01


def test_a_restored_replica_goes_on_as_if_it_had_not_stopped() -> None:
    wanted = recipe(model=partial(mlp, dropout=0.5), scheduler=schedule)
    straight = Trained(wanted).steps(20)
    state, model = copy.deepcopy((straight.replica.state(), straight.replica.model.state_dict()))
    straight.steps(15)
    resumed = Trained(wanted)
    resumed.replica.model.load_state_dict(model)
    resumed.replica.restore(state)
    assert distance(resumed.steps(15), straight) < 1e-5


def test_a_state_from_captured_steps_goes_on_in_eager_ones() -> None:
    captured = Trained(recipe()).steps(10)
    eager = Trained(recipe(), execution="eager")
    eager.replica.model.load_state_dict(captured.replica.model.state_dict())
    eager.replica.restore(copy.deepcopy(captured.replica.state()))
    assert distance(eager.steps(10), captured.steps(10)) < 1e-4


def test_a_layer_frozen_between_segments_stays_as_it_is() -> None:
    trained = Trained(recipe()).steps(5)
    assert trained.replica.captured is not None
    trained.replica.captured.sleep()
    first = trained.replica.model[0].weight
    first.requires_grad_(False)
    trained.replica.captured.wake()
    before = first.clone()
    assert torch.equal(trained.steps(5).replica.model[0].weight, before)
    assert trained.num_graphs == 1


# What cannot be captured.


def reads_the_loss(model: nn.Module, batch: Any) -> Tensor:
    loss = loss_of(model, batch)
    return loss * (1.0 if loss.item() > 0 else 2.0)


def draws_on_the_host(model: nn.Module, batch: Any) -> Tensor:
    return loss_of(model, batch) * (1.0 + 0.1 * random.random())


def logs_a_number(model: nn.Module, batch: Any) -> Tensor:
    outrider.log("one", 1.0)
    return loss_of(model, batch)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) / self.calls


WAITS = "the step waits for the device, as .item(), .cpu() or a copy from unpinned memory do"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"step": reads_the_loss}, WAITS),
        ({"step": draws_on_the_host}, "it draws random numbers on the host"),
        (
            {"step": logs_a_number},
            "log('one', ...) is not given a tensor on the device at every step: a replay would not log it",
        ),
        ({"model": Counting}, "the model keeps calls from one step to the next outside its buffers"),
        ({"optimizer": torch.optim.Adagrad}, "Adagrad has no form in torch that can be captured"),
    ],
)
def test_what_cannot_be_captured_runs_eagerly_and_says_why(options: dict[str, Any], reason: str) -> None:
    trained = Trained(recipe(**options))
    assert trained.decision is not None
    assert (trained.decision.value, trained.decision.reason) == ("eager", f"the step cannot be captured: {reason}")
    eager = Trained(recipe(**options), execution="eager")
    random.seed(0)
    trained.steps(5)
    random.seed(0)
    assert distance(trained, eager.steps(5)) < 1e-6


def test_a_schedule_of_the_momentum_ends_the_captures() -> None:
    def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=100)

    wanted = recipe(scheduler=one_cycle)
    trained, eager = Trained(wanted).steps(20), Trained(wanted, execution="eager").steps(20)
    (decision,) = trained.later
    assert (decision.kind, decision.value, decision.reason) == (
        "execution",
        "eager",
        "the step can no longer be captured: "
        "settings of the optimizer other than its learning rate change between steps",
    )
    assert distance(trained, eager) < 1e-5
