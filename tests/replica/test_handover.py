"""What a replica takes over from another that worked alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from outrider.errors import ConfigError
from outrider.replica.recipe import Recipe
from outrider.replica.replica import Replica
from outrider.replica.state_transfer import Cargo, pack, places, take_over

CPU = torch.device("cpu")
DATA = torch.randn(8, 3, generator=torch.Generator().manual_seed(2))
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "adafactor": partial(torch.optim.Adafactor, lr=0.01),
}


class TwoPaths(nn.Module):
    """The second path is taken from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)
        self.num_calls = 0

    def forward(self, inputs: Any) -> Any:
        self.num_calls += 1
        return self.first(inputs) if self.num_calls < 3 else self.second(inputs)


def falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)


def make(optimizer: Callable[..., Any], model: Callable[[], nn.Module] = lambda: nn.Linear(3, 2)) -> Replica:
    recipe = Recipe(
        model=model,
        optimizer=optimizer,
        scheduler=falling,
        step=lambda model, batch: model(batch).square().mean(),
        dataset=DATA,
        batch_size=4,
        policy="balanced",
    )
    return Replica(recipe, device=CPU, rank=0, name="cpu")


def steps(replica: Replica, *, start: int, stop: int) -> None:
    for number in range(start, stop):
        replica.step(DATA, samples=8, at=8 * number)


def hand_over(giver: Replica, taker: Replica, *, at: int) -> None:
    taker.model.load_state_dict(giver.model.state_dict())
    take_over(taker, pack(giver), at=at)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_who_took_over_goes_on_to_the_same_bits(optimizer: Callable[..., Any]) -> None:
    giver, taker = make(optimizer), make(optimizer)
    steps(giver, start=0, stop=5)
    steps(taker, start=0, stop=1)
    hand_over(giver, taker, at=32)
    for replica in (giver, taker):
        steps(replica, start=5, stop=8)
    assert torch.equal(giver.model.weight, taker.model.weight)
    assert (taker.steps, taker.learning_rate) == (giver.steps, giver.learning_rate)


def test_the_learning_rate_follows_before_the_next_step() -> None:
    giver, taker = make(OPTIMIZERS["adam"]), make(OPTIMIZERS["adam"])
    steps(giver, start=0, stop=4)
    steps(taker, start=0, stop=1)
    hand_over(giver, taker, at=24)
    assert taker.learning_rate == giver.learning_rate == pytest.approx(0.01 * 0.5**6)


def test_state_that_was_not_there_has_the_memory_format_that_it_had() -> None:
    conv = partial(nn.Conv2d, 2, 3, 3)
    giver, taker = (make(OPTIMIZERS["adam"], lambda: conv().to(memory_format=torch.channels_last)) for _ in range(2))
    for parameter in giver.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    giver.optimizer.step()
    cargo = pack(giver)
    arrived = places(taker, cargo.manifest)
    for tensor, place in zip(cargo.tensors, arrived, strict=True):
        place.copy_(tensor)
    take_over(taker, Cargo(cargo.steps, cargo.manifest, arrived), at=0)
    given, taken = (one.optimizer.state[one.model.weight]["exp_avg"] for one in (giver, taker))
    assert taken.stride() == given.stride() != given.contiguous().stride()
    assert torch.equal(taken, given)


class Remembering(torch.optim.SGD):
    """Keeps a list for every parameter, as LBFGS and its kin do."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("sizes", []).append(float(parameter.detach().norm()))
        return super().step(closure)


def test_what_is_no_tensor_is_taken_over_too() -> None:
    optimizer = partial(Remembering, lr=0.1, momentum=0.9)
    giver, taker = make(optimizer), make(optimizer)
    steps(giver, start=0, stop=3)
    steps(taker, start=0, stop=1)
    hand_over(giver, taker, at=16)
    assert len(taker.optimizer.state[taker.model.weight]["sizes"]) == 3
    steps(giver, start=3, stop=4)
    hand_over(giver, taker, at=24)
    assert taker.optimizer.state[taker.model.weight]["sizes"] == giver.optimizer.state[giver.model.weight]["sizes"]


def test_state_keeps_its_place_in_memory() -> None:
    giver, taker = make(OPTIMIZERS["adam"]), make(OPTIMIZERS["adam"])
    steps(giver, start=0, stop=3)
    steps(taker, start=0, stop=1)
    state = taker.optimizer.state[taker.model.weight]
    before = {key: value.data_ptr() for key, value in state.items()}
    hand_over(giver, taker, at=16)
    assert {key: value.data_ptr() for key, value in state.items()} == before
    assert state["step"].item() == 3.0


def test_state_that_was_not_there_is_taken_over_too() -> None:
    giver, taker = make(OPTIMIZERS["adam"], TwoPaths), make(OPTIMIZERS["adam"], TwoPaths)
    steps(giver, start=0, stop=4)
    steps(taker, start=0, stop=1)
    assert taker.model.second.weight not in taker.optimizer.state
    hand_over(giver, taker, at=24)
    taker.model.num_calls = giver.model.num_calls
    for replica in (giver, taker):
        steps(replica, start=4, stop=6)
    assert torch.equal(giver.model.second.weight, taker.model.second.weight)


class Precise(torch.optim.SGD):
    """Keeps a momentum in float32 beside parameters in bfloat16."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["slow"] = state.get("slow", torch.zeros(parameter.shape)) + 1e-6
        return super().step(closure)


def test_state_keeps_its_dtype_beside_parameters_of_another() -> None:
    giver = make(partial(Precise, lr=0.1), lambda: nn.Linear(3, 2).bfloat16())
    taker = make(partial(Precise, lr=0.1), lambda: nn.Linear(3, 2).bfloat16())
    for parameter in giver.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    giver.optimizer.step()
    hand_over(giver, taker, at=0)
    taken = taker.optimizer.state[taker.model.weight]["slow"]
    assert taken.dtype == torch.float32
    assert torch.equal(taken, torch.full((2, 3), 1e-6))


def test_parameter_groups_stay_the_same_objects() -> None:
    """A user's loop may hold them, to set rates."""
    giver, taker = make(OPTIMIZERS["adam"]), make(OPTIMIZERS["adam"])
    steps(giver, start=0, stop=2)
    groups = list(taker.optimizer.param_groups)
    hand_over(giver, taker, at=8)
    assert [id(group) for group in taker.optimizer.param_groups] == [id(group) for group in groups]
    assert taker.optimizer.state[taker.model.weight]["step"].item() == 2.0


class Nested(torch.optim.SGD):
    """Keeps tensors in a list and numbers in a dict and a tuple, as SOAP and its kin do."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["factors"] = [parameter.detach() @ parameter.detach().T] if parameter.dim() == 2 else []
            state["counts"] = {"steps": 1 + state.get("counts", {"steps": 0})["steps"], 0: (True, None, "a")}
        return super().step(closure)


def test_tensors_inside_lists_are_taken_over_too() -> None:
    optimizer = partial(Nested, lr=0.1, momentum=0.9)
    giver, taker = make(optimizer), make(optimizer)
    steps(giver, start=0, stop=3)
    steps(taker, start=0, stop=1)
    hand_over(giver, taker, at=16)
    given, taken = (one.optimizer.state[one.model.weight] for one in (giver, taker))
    assert torch.equal(taken["factors"][0], given["factors"][0])
    assert taken["factors"][0].data_ptr() != given["factors"][0].data_ptr()
    assert taken["counts"] == given["counts"] == {"steps": 3, 0: (True, None, "a")}


def test_a_manifest_is_json_without_the_numbers_of_tensors() -> None:
    giver = make(OPTIMIZERS["sgd"], lambda: nn.Linear(3, 2, bias=False))
    steps(giver, start=0, stop=1)
    described = {"tensor": [[2, 3], [3, 1], "float32"]}
    assert json.loads(pack(giver).manifest) == [[0, [["momentum_buffer", described]]]]


class Peculiar(torch.optim.SGD):
    """Keeps an object of its own."""

    def step(self, closure: Any = None) -> Any:
        self.state[self.param_groups[0]["params"][0]]["notes"] = object()
        return super().step(closure)


def test_a_state_with_objects_of_its_own_is_refused_with_a_reason() -> None:
    giver = make(partial(Peculiar, lr=0.1))
    steps(giver, start=0, stop=1)
    with pytest.raises(ConfigError) as caught:
        pack(giver)
    assert caught.value.message == (
        "the optimizer keeps an object of type object in 'notes' of parameter 0, which cannot be handed to other ranks"
    )
    assert caught.value.hint == (
        'keep tensors, numbers, text, lists and dicts in its state, or pass policy="sync" (or "balanced" in a Session)'
    )


def test_a_manifest_that_names_anything_but_a_dtype_is_refused() -> None:
    taker = make(OPTIMIZERS["sgd"])
    manifest = json.dumps([[0, [["momentum_buffer", {"tensor": [[1], [1], "load"]}]]]]).encode()
    with pytest.raises(ConfigError, match="unknown dtype 'load' in a hand-over"):
        places(taker, manifest)


def test_sums_do_not_overlap_in_a_step_for_which_a_parameter_is_frozen() -> None:
    """As for one half of a GAN: no gradient comes that a sum could wait for."""
    replica = make(OPTIMIZERS["adam"])
    assert replica.can_overlap
    next(replica.model.parameters()).requires_grad_(False)
    assert not replica.can_overlap
