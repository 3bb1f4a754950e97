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


def test_ranks_draw_numbers_of_their_own_and_rank_0_those_of_a_plain_loop() -> None:
    with randomness.preserved():
        drawn = []
        for rank in range(3):
            randomness.seed_run(5)
            randomness.seed_rank(5, rank)
            drawn.append(_draw_from_each())
        randomness.seed_run(5)
        assert drawn[0] == _draw_from_each()
    assert all(len({numbers[i] for numbers in drawn}) == 3 for i in range(3))


def test_a_saved_state_goes_on_where_it_was_taken() -> None:
    with randomness.preserved():
        np.random.normal()  # leaves half of a pair behind, which is part of the state
        state = randomness.saved_state(torch.device("cpu"))
        expected = _draw_from_each()
        randomness.seed_all(1)
        randomness.restore_saved(torch.device("cpu"), state)
        assert _draw_from_each() == expected


def test_the_state_of_another_kind_of_device_is_left_out() -> None:
    with randomness.preserved():
        state = randomness.saved_state(torch.device("cpu"))
        state["device"] = {"kind": "cuda", "state": torch.zeros(16, dtype=torch.uint8)}
        randomness.restore_saved(torch.device("cpu"), state)
