"""State that a checkpoint can hold: what is read back, and what is refused with its place and type."""

from __future__ import annotations

import collections
import enum
import io
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from outrider.errors import ConfigError
from outrider.replica.portable_state import num_bytes, portable, restored

HINT = (
    "state_dict() of the optimizer or schedule must return numbers, text, tensors, and lists or dicts of these; "
    "override state_dict() and load_state_dict() to leave out the rest"
)


class Pair(NamedTuple):
    left: int
    right: float


class Level(enum.IntEnum):
    LOW = 1


class Warmup:
    """A callable with plain attributes, as LambdaLR keeps it."""

    def __init__(self, steps: int) -> None:
        self.steps = np.int64(steps)

    def __call__(self, tick: int) -> float:
        return min(1.0, (tick + 1) / float(self.steps))


def read_back(state: Any) -> Any:
    """As from a file: written by torch and read without any code."""
    file = io.BytesIO()
    torch.save(portable(state), file)
    file.seek(0)
    return restored(torch.load(file, weights_only=True))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(0.1), 0.1),
        (np.float32(0.5), 0.5),
        (np.longdouble(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.str_("linear"), "linear"),
        (Level.LOW, 1),
        ((1, [2.0, None]), (1, [2.0, None])),
        (collections.OrderedDict(b=1, a=2), collections.OrderedDict(b=1, a=2)),
        (collections.Counter({30: 1}), collections.Counter({30: 1})),
        (collections.deque([1, 2], maxlen=5), collections.deque([1, 2], maxlen=5)),
        (collections.defaultdict(list, {"a": [1]}), collections.defaultdict(list, {"a": [1]})),
        ({1, 2}, {1, 2}),
        (frozenset({"a"}), frozenset({"a"})),
        (Pair(1, 2.0), Pair(1, 2.0)),
        ({np.int64(3): np.float64(2.0)}, {3: 2.0}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_is_read_back_as_it_was(value: Any, expected: Any) -> None:
    found = read_back({"value": value})["value"]
    assert found == expected
    assert getattr(found, "maxlen", None) == getattr(expected, "maxlen", None)
    assert isinstance(found, type(expected)) or hasattr(expected, "_fields")


def test_fields_of_a_named_tuple_keep_their_names() -> None:
    assert read_back(Pair(1, 2.0)).right == 2.0


def test_an_array_is_read_back_as_an_array() -> None:
    table = np.linspace(0, 1, 3, dtype=np.float32)[::2]
    found = read_back({"table": table})["table"]
    assert isinstance(found, np.ndarray)
    assert (found.dtype, found.tolist()) == (table.dtype, table.tolist())


def test_a_copy_shares_no_memory_and_holds_no_more_than_the_tensor() -> None:
    whole = torch.zeros(1_000)
    state = {"momentum": whole[:2], "again": whole[:2]}
    copy = portable(state)
    whole.fill_(1.0)
    assert copy["momentum"].tolist() == [0.0, 0.0]
    assert copy["momentum"].untyped_storage().nbytes() == 8


def test_a_tensor_that_occurs_twice_is_one_tensor_in_the_copy() -> None:
    tensor = torch.zeros(2)
    copy = portable([tensor, tensor])
    assert copy[0] is copy[1]


def test_the_size_of_a_state_is_that_of_its_tensors() -> None:
    assert num_bytes({"a": torch.zeros(3), "b": [torch.zeros(2, dtype=torch.float64), 1]}) == 28


def test_a_schedule_by_a_callable_object_goes_on(one_thread: None) -> None:
    def make(steps: int) -> lr_scheduler.LambdaLR:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=np.float64(0.1))
        return lr_scheduler.LambdaLR(optimizer, [Warmup(steps)])

    saved, other = make(4), make(9)
    saved.optimizer.step()
    saved.step()
    other.load_state_dict(read_back(saved.state_dict()))
    other.optimizer.load_state_dict(read_back(saved.optimizer.state_dict()))
    assert other.lr_lambdas[0].steps == 4
    assert (other.last_epoch, other.get_last_lr()) == (saved.last_epoch, saved.get_last_lr())


def refused(state: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        portable(state, "scheduler")
    assert caught.value.hint == HINT
    return caught.value.message


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"warm": len}, "scheduler['warm'] is a builtin_function_or_method, which a checkpoint cannot hold"),
        ({"f": [1, lambda: 0]}, "scheduler['f'][1] is a function, which a checkpoint cannot hold"),
        ((1, torch.Generator()), "scheduler[1] is a torch._C.Generator, which a checkpoint cannot hold"),
        (
            {"d": collections.defaultdict(Warmup)},
            f"scheduler['d'] is a collections.defaultdict, its default_factory is {Warmup!r}, "
            "which a checkpoint cannot hold",
        ),
        (
            {"a": np.array(["x"])},
            "scheduler['a'] is a numpy.ndarray, its dtype is <U1, which a checkpoint cannot hold",
        ),
    ],
    ids=["builtin", "function", "generator", "factory", "text array"],
)
def test_an_object_that_cannot_be_read_back_is_named(state: Any, message: str) -> None:
    assert refused(state) == message


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["me"] = state
    assert refused(state) == "scheduler['me'] is a dict, it contains itself, which a checkpoint cannot hold"


def test_a_tensor_of_a_class_of_its_own_is_refused_where_it_could_not_be_read() -> None:
    class Quantized(torch.Tensor):
        pass

    tensor = torch.zeros(2).as_subclass(Quantized)
    assert refused({"state": {0: tensor}}).startswith("scheduler['state'][0] is a ")
