"""Numbers from keys: the same arithmetic as the seeds of samples, and evenly spread."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.data.keyed import below, sample_keys, uniform
from outrider.data.order import mix, sample_seed

KEYS = sample_keys(torch.arange(20_000), seed=0, epoch=0)


@given(seed=st.integers(0, 2**63), epoch=st.integers(0, 1_000), samples=st.lists(st.integers(0, 2**40), min_size=1))
def test_keys_are_the_seeds_of_the_samples(seed: int, epoch: int, samples: list[int]) -> None:
    keys = sample_keys(torch.tensor(samples), seed=seed, epoch=epoch)
    assert [key % 2**64 for key in keys.tolist()] == [sample_seed(seed, epoch, sample) for sample in samples]


@given(key=st.integers(-(2**63), 2**63 - 1), stream=st.integers(0, 100))
def test_a_uniform_number_is_the_top_of_the_mixed_key(key: int, stream: int) -> None:
    mixed = mix_once(key % 2**64, stream)
    assert uniform(torch.tensor([key]), stream).item() == (mixed >> 40) / 2**24


def mix_once(state: int, value: int) -> int:
    """`mix` begins with nothing: a first value that leaves `state` there is not known, so its round is done here."""
    mixed = ((state ^ value) + 0x9E3779B97F4A7C15) % 2**64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % 2**64
    return mixed ^ (mixed >> 31)


def test_the_round_above_is_that_of_mix() -> None:
    assert mix_once(mix(7), 9) == mix(7, 9)


@given(keys=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1), bound=st.integers(1, 1_000))
def test_whole_numbers_stay_below_their_bound(keys: list[int], bound: int) -> None:
    drawn = below(torch.tensor(keys), 0, bound)
    assert drawn.dtype == torch.int64
    assert drawn.min() >= 0
    assert drawn.max() < bound


def test_uniform_numbers_fill_the_unit_interval_evenly() -> None:
    numbers = uniform(KEYS, 0)
    assert numbers.dtype == torch.float32
    counts = torch.histc(numbers, bins=10, min=0.0, max=1.0)
    # 2,000 expected in each; five standard deviations are 212.
    assert (counts - 2_000).abs().max() < 212


def test_whole_numbers_are_equally_likely() -> None:
    counts = torch.bincount(below(KEYS, 0, 9), minlength=9)
    assert (counts - 20_000 / 9).abs().max() < 222


@pytest.mark.parametrize("other", [uniform(KEYS, 1), uniform(sample_keys(torch.arange(20_000), seed=0, epoch=1), 0)])
def test_streams_and_epochs_are_independent(other: torch.Tensor) -> None:
    correlation = torch.corrcoef(torch.stack([uniform(KEYS, 0), other]))[0, 1]
    # One over the square root of 20,000 is 0.007.
    assert abs(correlation.item()) < 0.035


def test_no_generator_is_drawn_from() -> None:
    before = torch.get_rng_state()
    uniform(KEYS, 0)
    assert torch.equal(torch.get_rng_state(), before)
