"""Permutations and sample seeds."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.data.order import in_order, mix, sample_seed, shuffled

_SEEDS = st.integers(min_value=-(2**63), max_value=2**64 - 1)


@given(num_samples=st.integers(0, 500), seed=_SEEDS, epoch=st.integers(0, 10_000))
def test_every_sample_comes_exactly_once_in_an_epoch(num_samples: int, seed: int, epoch: int) -> None:
    order = shuffled(num_samples, seed=seed, epoch=epoch)
    assert order.dtype == torch.int64
    assert torch.equal(order.sort().values, torch.arange(num_samples))


@given(seed=_SEEDS, epoch=st.integers(0, 10_000))
def test_the_same_seed_and_epoch_give_the_same_order(seed: int, epoch: int) -> None:
    assert torch.equal(shuffled(97, seed=seed, epoch=epoch), shuffled(97, seed=seed, epoch=epoch))


@given(seed=st.integers(0, 10_000), epoch=st.integers(0, 1_000))
def test_the_next_seed_is_not_the_next_epoch(seed: int, epoch: int) -> None:
    assert not torch.equal(shuffled(97, seed=seed, epoch=epoch + 1), shuffled(97, seed=seed + 1, epoch=epoch))


def test_an_order_is_pinned_so_that_no_release_changes_it_unseen() -> None:
    assert shuffled(10, seed=0, epoch=0).tolist() == [0, 7, 8, 2, 5, 9, 4, 6, 3, 1]


def test_positions_of_a_sample_are_spread_evenly_over_epochs() -> None:
    positions = torch.stack([shuffled(100, seed=1, epoch=epoch).argsort() for epoch in range(400)]).float()
    # Mean of 400 uniform positions: 49.5 with a standard error of 1.44; six of them never happen by chance.
    assert (positions.mean(dim=0) - 49.5).abs().max() < 6 * 1.44


def test_in_order_counts_up() -> None:
    assert in_order(4).tolist() == [0, 1, 2, 3]


def test_mix_is_splitmix64() -> None:
    assert mix(0) == 0xE220A8397B1DCDAF


@given(seed=_SEEDS, epoch=st.integers(0, 10_000), index=st.integers(0, 10**9))
def test_a_sample_seed_has_64_bits(seed: int, epoch: int, index: int) -> None:
    assert 0 <= sample_seed(seed, epoch, index) < 2**64


def test_sample_seeds_differ_between_seeds_epochs_and_samples() -> None:
    seeds = {sample_seed(seed, epoch, index) for seed in range(10) for epoch in range(10) for index in range(100)}
    assert len(seeds) == 10 * 10 * 100
