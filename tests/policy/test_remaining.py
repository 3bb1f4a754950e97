"""What is left of an epoch whose segments ended early."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.policy.effects import Lease
from outrider.policy.remaining import Remaining


def positions(remaining: Remaining) -> list[int]:
    return [position for piece in remaining.pieces for position in range(piece.start, piece.stop)]


def test_an_untouched_epoch_is_its_whole_permutation() -> None:
    whole = Remaining.whole(10)
    assert (whole.position, whole.count, whole.is_in_order) == (0, 10, True)


def test_what_was_given_back_comes_before_the_rest() -> None:
    left = Remaining.whole(100).after([Lease(20, 5), Lease(60, 40)])
    assert positions(left) == [*range(20, 25), *range(60, 100)]
    assert left.position == 55
    assert not left.is_in_order


def test_positions_count_from_what_is_done_after_an_early_end() -> None:
    left = Remaining.whole(100).after([Lease(20, 5), Lease(60, 40)]).after([Lease(58, 42)])
    assert positions(left) == [*range(23, 25), *range(60, 100)]


@given(st.integers(1, 200), st.data())
def test_early_ends_keep_every_position_that_is_left_exactly_once(end: int, data: st.DataObject) -> None:
    remaining, expected = Remaining.whole(end), list(range(end))
    for _ in range(3):
        cuts = sorted(data.draw(st.lists(st.integers(0, remaining.count), min_size=2, max_size=2, unique=False)))
        first, second = cuts
        at = remaining.position
        left = [Lease(at + first, second - first), Lease(at + remaining.count, 0)]
        remaining, expected = remaining.after(left), expected[first:second]
        assert positions(remaining) == expected
        assert Remaining.restored(remaining.state(), end=end).pieces == remaining.pieces
