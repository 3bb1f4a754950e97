from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.effects import Lease
from outrider.core.ledger import Ledger, lease_size

PRIMES = [2, 3, 7, 31, 101, 499, 997, 1999, 4001]
paces = st.lists(st.floats(min_value=1.0, max_value=20.0), min_size=1, max_size=5)
batch_sizes = st.sampled_from([1, 3, 7, 16, 33, 64])
unhurried = settings(deadline=None)
ROUNDING = 1 + 1e-6


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
    ledger = Ledger(0, total, world_size=world_size)
    finished = Finished(last_ms=dict.fromkeys(range(world_size), 0.0))
    paces = [pace_at(rank, 0.0) for rank in range(world_size)]
    queue = [(0.0, rank) for rank in range(world_size)]
    while queue:
        now_ms, rank = heapq.heappop(queue)
        share = 1 / paces[rank] / sum(1 / pace for pace in paces)
        is_fastest = paces.index(min(paces)) == rank
        lease = ledger.take(rank, wanted * batch_size, share=share, batch_size=batch_size, is_fastest=is_fastest)
        if lease is None:
            continue
        for batch in lease.batches(batch_size):
            paces[rank] = pace_at(rank, now_ms)
            now_ms += paces[rank] * batch.count / batch_size
        finished.positions += range(lease.start, lease.stop)
        finished.last_ms[rank] = now_ms
        ledger.done(rank, lease)
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
@given(total=st.sampled_from(PRIMES), batch_size=batch_sizes, paces=paces)
def test_all_ranks_finish_within_one_batch_of_the_slowest(total: int, batch_size: int, paces: list[float]) -> None:
    finished = run_epoch(total, batch_size, len(paces), lambda rank, _: paces[rank])
    assert finished.spread_ms <= max(paces) * ROUNDING


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
    assert finished.spread_ms <= max(paces[0] * factor, *paces) * ROUNDING


@unhurried
@given(total=st.sampled_from([997, 1999]), batch_size=st.sampled_from([1, 3]), paces=paces, factor=st.floats(0.5, 2.0))
def test_after_a_twofold_change_of_speed_all_still_finish_within_one_batch_with_whole_windows_leased(
    total: int, batch_size: int, paces: list[float], factor: float
) -> None:
    at_ms = half_time_ms(total, batch_size, paces)
    finished = run_epoch(total, batch_size, len(paces), changing(paces, factor=factor, at_ms=at_ms))
    assert finished.spread_ms <= max(paces[0] * factor, *paces) * ROUNDING


@unhurried
@given(total=st.sampled_from(PRIMES), asked=st.lists(st.integers(0, 3), min_size=1, max_size=50))
def test_when_every_rank_believes_another_is_fastest_no_position_is_left_behind(total: int, asked: list[int]) -> None:
    ledger = Ledger(0, total, world_size=4)
    still_asking = set(range(4))
    order = itertools.chain(asked, itertools.cycle(range(4)))
    while still_asking:
        rank = next(rank for rank in order if rank in still_asking)
        lease = ledger.take(rank, 64, share=0.001, batch_size=8, is_fastest=False)
        if lease is None:
            still_asking.discard(rank)
    assert ledger.remaining == 0


def test_a_lease_is_at_most_half_of_the_fair_share_of_what_is_left() -> None:
    assert lease_size(10_000, 8_000, share=0.5, batch_size=64, is_fastest=True) == 31 * 64


def test_a_lease_is_at_most_what_was_wanted() -> None:
    assert lease_size(128, 8_000, share=0.5, batch_size=64, is_fastest=True) == 128


def test_a_lease_is_at_least_one_batch() -> None:
    assert lease_size(640, 100, share=0.3, batch_size=64, is_fastest=False, world_size=3) == 64


def test_the_last_lease_is_what_is_left() -> None:
    assert lease_size(640, 5, share=0.5, batch_size=64, is_fastest=True) == 5


def test_nothing_is_left_to_lease_at_the_end() -> None:
    assert lease_size(640, 0, share=1.0, batch_size=64, is_fastest=True) == 0


def test_a_rank_too_slow_for_one_more_batch_leaves_it_to_the_others() -> None:
    assert lease_size(64, 64, share=0.1, batch_size=64, is_fastest=False, world_size=2) == 0


def test_a_slow_rank_takes_a_batch_while_the_others_have_enough_to_do() -> None:
    assert lease_size(64, 640, share=0.1, batch_size=64, is_fastest=False, world_size=2) == 64


def test_equal_ranks_leave_nothing_to_each_other() -> None:
    assert lease_size(64, 64, share=0.01, batch_size=64, is_fastest=False, world_size=100) == 64


def test_the_fastest_rank_is_never_refused() -> None:
    assert lease_size(64, 64, share=0.1, batch_size=64, is_fastest=True, world_size=2) == 64


def test_nobody_is_refused_in_a_world_of_unknown_size() -> None:
    assert lease_size(64, 64, share=0.1, batch_size=64, is_fastest=False) == 64


def test_leases_follow_each_other() -> None:
    ledger = Ledger(10, 30)
    first = ledger.take(0, 8, share=1.0, batch_size=8, is_fastest=True)
    second = ledger.take(1, 8, share=1.0, batch_size=8, is_fastest=True)
    assert (first, second) == (Lease(10, 8), Lease(18, 8))


def test_what_is_leased_is_outstanding_until_it_is_acknowledged() -> None:
    ledger = Ledger(0, 16)
    lease = ledger.take(0, 16, share=1.0, batch_size=16, is_fastest=True)
    assert (ledger.remaining, ledger.outstanding, ledger.is_done) == (0, 16, False)
    assert lease is not None
    ledger.done(0, lease)
    assert (ledger.remaining, ledger.outstanding, ledger.is_done) == (0, 0, True)


def test_an_empty_span_is_done_at_once() -> None:
    assert Ledger(5, 5).is_done


def test_a_lost_ranks_unfinished_lease_is_handed_out_again_first() -> None:
    ledger = Ledger(0, 100, world_size=2)
    lost = ledger.take(0, 10, share=0.5, batch_size=10, is_fastest=True)
    ledger.take(1, 10, share=0.5, batch_size=10, is_fastest=True)
    ledger.lose(0)
    assert ledger.take(1, 10, share=1.0, batch_size=10, is_fastest=True) == lost


def test_a_lost_ranks_acknowledged_lease_is_not_handed_out_again() -> None:
    ledger = Ledger(0, 100)
    lease = ledger.take(0, 10, share=0.5, batch_size=10, is_fastest=True)
    assert lease is not None
    ledger.done(0, lease)
    ledger.lose(0)
    assert ledger.take(1, 10, share=1.0, batch_size=10, is_fastest=True) == Lease(10, 10)


def test_a_slow_rank_left_alone_is_not_refused() -> None:
    ledger = Ledger(0, 8, world_size=3)
    ledger.lose(0)
    ledger.lose(1)
    assert ledger.take(2, 8, share=0.01, batch_size=8, is_fastest=False) == Lease(0, 8)


def test_acknowledging_a_lease_one_does_not_hold_is_a_defect() -> None:
    with pytest.raises(AssertionError, match="rank 1 acknowledged"):
        Ledger(0, 8).done(1, Lease(0, 8))


def test_a_restored_ledger_goes_on_where_the_saved_one_was() -> None:
    ledger = Ledger(0, 100, world_size=3)
    ledger.take(0, 30, share=0.6, batch_size=10, is_fastest=True)
    ledger.take(1, 10, share=0.3, batch_size=10, is_fastest=False)
    ledger.lose(1)
    restored = Ledger.restored(json.loads(json.dumps(ledger.state())))
    assert restored.state() == ledger.state()
    assert restored.take(2, 10, share=0.1, batch_size=10, is_fastest=False) == Lease(30, 10)
