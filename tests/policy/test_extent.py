"""Where the epochs of a run end."""

from __future__ import annotations

from outrider.policy.effects import Lease
from outrider.policy.extent import Extent


def test_the_last_epoch_is_cut() -> None:
    extent = Extent(epoch_samples=96, total=240)
    assert extent.num_epochs == 3
    assert [extent.stop(epoch) for epoch in range(4)] == [96, 96, 48, 0]


def test_whole_epochs_are_not_cut() -> None:
    extent = Extent(epoch_samples=96, total=192)
    assert [extent.stop(epoch) for epoch in range(3)] == [96, 96, 0]
    assert extent.is_done(2, 0)
    assert not extent.is_done(1, 95)


def test_progress_goes_from_0_to_1() -> None:
    extent = Extent(epoch_samples=96, total=240)
    assert [extent.progress(*at) for at in [(0, 0), (1, 24), (2, 48), (2, 96)]] == [0.0, 0.5, 1.0, 1.0]


def test_segments_end_where_the_epoch_does() -> None:
    extent = Extent(epoch_samples=96, total=160)
    halves = [Lease(0, 48), Lease(48, 48)]
    assert extent.cut(0, halves) == halves
    assert extent.cut(1, halves) == [Lease(0, 48), Lease(48, 16)]
