from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outrider.policy.effects import Lease
from outrider.policy.ledger import Holder, Ledger, lease_size

PRIMES = [2, 3, 7, 31, 101, 499, 997, 1999, 4001]
paces = st.lists(st.floats(min_value=1.0, max_value=20.0), min_size=1, max_size=5)
batch_sizes = st.sampled_from([1, 3, 7, 16, 33, 64])
unhurried = settings(deadline=None)
ROUNDING = 1 + 1e-6


def slack(paces: list[float]) -> float:
    """Of four ranks and more, two may count on the same other: 11 times in 230,000 tries, and by 1.19 at worst."""
    return ROUNDING if len(paces) < 4 else 1.25


def one_batch(total: int, batch_size: int) -> float:
    """How much longer the last batch takes: a single sample that is left over joins it."""
    return 1 + 1 / batch_size if batch_size > 1 and total % batch_size == 1 else 1.0


@dataclass
class Finished:
    """What the clock loop saw."""

    positions: list[int] = field(default_factory=list)
    last_ms: dict[int, float] = field(default_factory=dict)

    @property
    def spread_ms(self) -> float:
        return max(self.last_ms.values()) - min(self.last_ms.values())


def run_epoch(
    total: int, batch_size: int, world_size: int, pace_at: Callable[[int, float], float], *, wanted: int = 8
) -> Finished:
    """Ranks take leases and do them batch by batch; shares follow the pace that each rank saw last."""
    ledger = Ledger(0, total)
    finished = Finished(last_ms=dict.fromkeys(range(world_size), 0.0))
    paces = [pace_at(rank, 0.0) for rank in range(world_size)]
    queue = [(0.0, rank) for rank in range(world_size)]
    held: dict[int, Lease] = {}
    while queue:
        now_ms, rank = heapq.heappop(queue)
        if rank in held:
            ledger.done(rank, held.pop(rank))
        share = 1 / paces[rank] / sum(1 / pace for pace in paces)
        lease = ledger.take(rank, wanted * batch_size, share=share, batch_size=batch_size)
        if lease is None:
            continue
        for batch in lease.batches(batch_size):
            paces[rank] = pace_at(rank, now_ms)
            now_ms += paces[rank] * batch.count / batch_size
        finished.positions += range(lease.start, lease.stop)
        finished.last_ms[rank] = now_ms
        held[rank] = lease
        heapq.heappush(queue, (now_ms, rank))
    assert ledger.is_done
    return finished


def changing(paces: list[float], *, factor: float, at_ms: float) -> Callable[[int, float], float]:
    """Rank 0 takes `factor` times as long from a moment on."""
    return lambda rank, now_ms: paces[rank] * (factor if rank == 0 and now_ms > at_ms else 1.0)


def half_time_ms(total: int, batch_size: int, paces: list[float]) -> float:
    return total / batch_size / sum(1 / pace for pace in paces) / 2


@unhurried
@given(total=st.sampled_from(PRIMES), batch_size=batch_sizes, paces=paces)
def test_every_position_is_used_exactly_once(total: int, batch_size: int, paces: list[float]) -> None:
    finished = run_epoch(total, batch_size, len(paces), lambda rank, _: paces[rank])
    assert sorted(finished.positions) == list(range(total))


@unhurried
@example(total=7, batch_size=3, paces=[6.0, 10.0])
@given(total=st.sampled_from(PRIMES), batch_size=batch_sizes, paces=paces)
def test_all_ranks_finish_within_one_batch_of_the_slowest(total: int, batch_size: int, paces: list[float]) -> None:
    finished = run_epoch(total, batch_size, len(paces), lambda rank, _: paces[rank])
    assert finished.spread_ms <= max(paces) * slack(paces) * one_batch(total, batch_size)


@unhurried
@given(total=st.sampled_from(PRIMES), batch_size=batch_sizes, paces=paces, factor=st.floats(0.05, 20.0))
def test_a_rank_that_changes_speed_in_mid_epoch_costs_no_position(
    total: int, batch_size: int, paces: list[float], factor: float
) -> None:
    at_ms = half_time_ms(total, batch_size, paces)
    finished = run_epoch(total, batch_size, len(paces), changing(paces, factor=factor, at_ms=at_ms))
    assert sorted(finished.positions) == list(range(total))


@unhurried
@given(total=st.sampled_from([997, 1999]), batch_size=st.sampled_from([1, 3]), paces=paces, factor=st.floats(0.05, 20))
def test_after_a_change_of_speed_all_still_finish_within_one_batch_when_leases_are_short(
    total: int, batch_size: int, paces: list[float], factor: float
) -> None:
    at_ms = half_time_ms(total, batch_size, paces)
    finished = run_epoch(total, batch_size, len(paces), changing(paces, factor=factor, at_ms=at_ms), wanted=1)
    assert finished.spread_ms <= max(paces[0] * factor, *paces) * ROUNDING * one_batch(total, batch_size)


@unhurried
@given(total=st.sampled_from([997, 1999]), batch_size=st.sampled_from([1, 3]), paces=paces, factor=st.floats(0.5, 2.0))
def test_after_a_twofold_change_of_speed_all_still_finish_within_one_batch_with_whole_windows_leased(
    total: int, batch_size: int, paces: list[float], factor: float
) -> None:
    at_ms = half_time_ms(total, batch_size, paces)
    finished = run_epoch(total, batch_size, len(paces), changing(paces, factor=factor, at_ms=at_ms))
    assert finished.spread_ms <= max(paces[0] * factor, *paces) * slack(paces) * one_batch(total, batch_size)


@unhurried
@given(total=st.sampled_from(PRIMES), asked=st.lists(st.tuples(st.integers(0, 3), st.floats(0.0, 1.0)), min_size=1))
def test_whatever_ranks_believe_about_their_shares_no_position_is_left_behind(
    total: int, asked: list[tuple[int, float]]
) -> None:
    ledger = Ledger(0, total)
    still_asking = {rank for rank, _ in asked}
    for rank, share in itertools.cycle(asked):
        if rank in still_asking and ledger.take(rank, 64, share=share, batch_size=8) is None:
            still_asking.discard(rank)
        if not still_asking:
            break
    assert ledger.remaining == 0


def test_a_lease_is_half_of_the_fair_share_of_what_is_left_in_whole_batches() -> None:
    assert lease_size(10_000, 8_000, share=0.5, batch_size=64) == 31 * 64


def test_a_lease_is_at_most_what_was_wanted() -> None:
    assert lease_size(128, 8_000, share=0.5, batch_size=64) == 128


def test_a_lease_is_at_least_one_batch() -> None:
    assert lease_size(640, 100, share=0.3, batch_size=64) == 64


def test_the_last_lease_is_what_is_left() -> None:
    assert lease_size(640, 5, share=0.5, batch_size=64) == 5


def test_nothing_is_left_to_lease_at_the_end() -> None:
    assert lease_size(640, 0, share=1.0, batch_size=64) == 0


def test_a_rank_too_slow_for_one_more_batch_leaves_it_to_the_others() -> None:
    others = [Holder(share=0.9, samples=128)]
    assert lease_size(64, 6 * 64, share=0.1, batch_size=64, others=others) == 0


def test_a_slow_rank_takes_a_batch_while_the_others_have_enough_to_do() -> None:
    others = [Holder(share=0.9, samples=128)]
    assert lease_size(64, 7 * 64, share=0.1, batch_size=64, others=others) == 64


def test_what_others_still_have_to_do_counts() -> None:
    others = [Holder(share=0.9, samples=9 * 64)]
    assert lease_size(64, 64, share=0.1, batch_size=64, others=others) == 64


def test_several_others_share_what_is_left() -> None:
    others = [Holder(share=0.45, samples=64), Holder(share=0.45, samples=64)]
    assert lease_size(64, 4 * 64, share=0.1, batch_size=64, others=others) == 0


def test_equal_ranks_leave_nothing_to_each_other() -> None:
    others = [Holder(share=0.01, samples=0)] * 99
    assert lease_size(64, 64, share=0.01, batch_size=64, others=others) == 64


def test_the_fastest_rank_is_never_refused() -> None:
    others = [Holder(share=0.3, samples=1), Holder(share=0.3, samples=1)]
    assert lease_size(64, 64, share=0.4, batch_size=64, others=others) == 64


def test_a_rank_without_others_at_work_is_never_refused() -> None:
    assert lease_size(64, 64, share=0.0, batch_size=64) == 64


def test_a_rank_that_was_refused_is_not_counted_on() -> None:
    ledger = Ledger(0, 30)
    ledger.take(0, 10, share=0.9, batch_size=10)
    assert ledger.take(1, 10, share=0.1, batch_size=10) is None
    assert ledger.take(0, 10, share=0.01, batch_size=10) == Lease(10, 10)


def test_a_single_sample_is_not_left_behind() -> None:
    ledger = Ledger(0, 17)
    assert ledger.take(0, 16, share=1.0, batch_size=16) == Lease(0, 17)


def test_what_a_lost_rank_leaves_is_not_cut_down_to_a_single_sample() -> None:
    ledger = Ledger(0, 64)
    ledger.take(0, 5, share=1.0, batch_size=4)
    ledger.lose(0)
    assert ledger.take(1, 4, share=0.0, batch_size=4) == Lease(0, 5)


def test_leases_follow_each_other() -> None:
    ledger = Ledger(10, 30)
    first = ledger.take(0, 8, share=1.0, batch_size=8)
    second = ledger.take(1, 8, share=1.0, batch_size=8)
    assert (first, second) == (Lease(10, 8), Lease(18, 8))


def test_what_is_leased_is_outstanding_until_it_is_acknowledged() -> None:
    ledger = Ledger(0, 16)
    lease = ledger.take(0, 16, share=1.0, batch_size=16)
    assert (ledger.remaining, ledger.outstanding, ledger.is_done) == (0, 16, False)
    assert lease is not None
    ledger.done(0, lease)
    assert (ledger.remaining, ledger.outstanding, ledger.is_done) == (0, 0, True)


def test_an_empty_span_is_done_at_once() -> None:
    assert Ledger(5, 5).is_done


def test_a_lost_ranks_unfinished_lease_is_handed_out_again_first() -> None:
    ledger = Ledger(0, 100)
    lost = ledger.take(0, 10, share=0.5, batch_size=10)
    ledger.take(1, 10, share=0.5, batch_size=10)
    ledger.lose(0)
    assert ledger.take(1, 10, share=1.0, batch_size=10) == lost


def test_a_lost_ranks_acknowledged_lease_is_not_handed_out_again() -> None:
    ledger = Ledger(0, 100)
    lease = ledger.take(0, 10, share=0.5, batch_size=10)
    assert lease is not None
    ledger.done(0, lease)
    ledger.lose(0)
    assert ledger.take(1, 10, share=1.0, batch_size=10) == Lease(10, 10)


def test_a_lost_rank_is_not_counted_on() -> None:
    ledger = Ledger(0, 20)
    ledger.take(0, 10, share=0.99, batch_size=10)
    ledger.lose(0)
    assert ledger.take(1, 10, share=0.01, batch_size=10) == Lease(0, 10)


def test_acknowledging_a_lease_one_does_not_hold_is_a_defect() -> None:
    with pytest.raises(AssertionError, match="rank 1 acknowledged"):
        Ledger(0, 8).done(1, Lease(0, 8))


def test_a_restored_ledger_goes_on_where_the_saved_one_was() -> None:
    ledger = Ledger(0, 100)
    ledger.take(0, 30, share=0.6, batch_size=10)
    ledger.take(1, 10, share=0.3, batch_size=10)
    ledger.lose(1)
    restored = Ledger.restored(json.loads(json.dumps(ledger.state())))
    assert restored.state() == ledger.state()
    assert restored.take(2, 10, share=0.1, batch_size=10) == Lease(30, 10)
