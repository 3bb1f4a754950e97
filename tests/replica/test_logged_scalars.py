"""Logged scalars: weights, threads, and what cannot be logged."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import ConfigError
from outrider.replica.logged_scalars import LoggedScalars, log, merged, writing


def test_drained_scalars_are_gone() -> None:
    book = LoggedScalars()
    book.add("loss", 2.0, 4)
    assert book.drain() == {"loss": (8.0, 4.0)}
    assert book.drain() == {}


def test_ranks_that_did_not_log_a_name_have_no_say_in_it() -> None:
    assert merged([{"a": (6.0, 2.0)}, {"b": (1.0, 1.0)}]) == {"a": 3.0, "b": 1.0}


def test_a_name_without_weight_is_not_a_number() -> None:
    assert math.isnan(merged([{"a": (0.0, 0.0)}])["a"])


@given(st.lists(st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(1, 100)), min_size=1), min_size=1, max_size=5))
def test_the_mean_does_not_depend_on_who_logged_what(ranks: list[list[tuple[float, int]]]) -> None:
    accounting = [LoggedScalars() for _ in ranks]
    for book, entries in zip(accounting, ranks, strict=True):
        for value, samples in entries:
            book.add("x", value, samples)
    everything = [entry for entries in ranks for entry in entries]
    mean = sum(value * samples for value, samples in everything) / sum(samples for _, samples in everything)
    assert merged([book.drain() for book in accounting])["x"] == pytest.approx(mean, abs=1e-9)


def test_a_logged_tensor_keeps_no_graph() -> None:
    book = LoggedScalars()
    book.add("x", torch.ones(1, requires_grad=True) * 2, 1)
    assert book.drain() == {"x": (2.0, 1.0)}


def test_a_tensor_of_many_elements_is_an_error() -> None:
    with pytest.raises(ConfigError) as caught, writing(LoggedScalars(), samples=1):
        log("x", torch.zeros(2, 3))
    assert str(caught.value) == "log('x', ...) needs a scalar, got a tensor of shape (2, 3)\nhint: log its mean"


def test_after_the_step_nothing_is_written_any_more() -> None:
    book = LoggedScalars()
    with writing(book, samples=3):
        log("x", 1.0)
    with pytest.raises(ConfigError):
        log("x", 1.0)
    assert book.drain() == {"x": (3.0, 3.0)}
