"""Where an epoch is cut for checkpoints."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.policy.effects import Lease
from outrider.policy.segments import segments


def test_half_an_epoch_ends_after_whole_batches_and_no_sample_is_left_alone() -> None:
    assert list(segments(Lease(0, 97), num_samples=97, every=0.5, unit=16)) == [Lease(0, 48), Lease(48, 49)]


def test_an_epoch_that_is_not_cut_is_one_segment() -> None:
    assert list(segments(Lease(0, 97), num_samples=97, every=None, unit=16)) == [Lease(0, 97)]
    assert list(segments(Lease(0, 97), num_samples=97, every=2.0, unit=16)) == [Lease(0, 97)]


def test_ten_tenths_are_ten_segments() -> None:
    assert len(list(segments(Lease(0, 1000), num_samples=1000, every=0.1, unit=1))) == 10


def test_a_run_that_goes_on_in_mid_epoch_has_the_same_cuts() -> None:
    assert list(segments(Lease(20, 76), num_samples=96, every=0.5, unit=8)) == [Lease(20, 28), Lease(48, 48)]


def test_an_epoch_that_ends_early_has_the_same_cuts() -> None:
    assert list(segments(Lease(0, 60), num_samples=96, every=0.5, unit=8)) == [Lease(0, 48), Lease(48, 12)]


@given(
    start=st.integers(0, 50),
    num_samples=st.integers(2, 500),
    every=st.floats(0.01, 0.99),
    unit=st.integers(2, 64),
)
def test_segments_cover_the_span_without_a_single_sample(start: int, num_samples: int, every: float, unit: int) -> None:
    # A run stands between two batches, and never one sample before the end.
    begin = min(start * unit, (num_samples - 2) // unit * unit)
    spans = list(segments(Lease(begin, num_samples - begin), num_samples=num_samples, every=every, unit=unit))
    assert [span.start for span in spans] == [begin, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == num_samples
    assert min(span.count for span in spans) > 1
