"""The generators that data sets draw from."""

from __future__ import annotations

import random

import numpy as np
import torch

from outrider.data import randomness


def _draw_from_each() -> tuple[float, float, float]:
    return random.random(), float(np.random.normal()), float(torch.rand(()))


def test_the_same_value_gives_the_same_numbers_from_all_three() -> None:
    with randomness.preserved():
        randomness.seed_all(2**64 - 1)
        first = _draw_from_each()
        randomness.seed_all(2**64 - 1)
        assert _draw_from_each() == first


def test_generators_go_on_as_if_nothing_had_been_drawn() -> None:
    before = randomness.capture()
    with randomness.preserved():
        randomness.seed_all(3)
        _draw_from_each()
    assert randomness.capture().equals(before)


def test_a_number_drawn_from_python_is_noticed() -> None:
    before = randomness.capture()
    random.random()
    assert not randomness.capture().equals(before)


def test_a_number_drawn_from_numpy_is_noticed() -> None:
    before = randomness.capture()
    np.random.random()
    assert not randomness.capture().equals(before)


def test_a_number_drawn_from_torch_is_noticed() -> None:
    before = randomness.capture()
    torch.rand(())
    assert not randomness.capture().equals(before)
