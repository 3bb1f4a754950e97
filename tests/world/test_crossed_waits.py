"""Ranks that wait for each other at different places: who notices, and what is told."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from outrider.errors import ConfigError, WaitError
from outrider.world import crossed_waits
from outrider.world.crossed_waits import Meeting, announce, await_all, follow, lead

EPOCH_END = Meeting(place="exchange/accounts", number=2, what="the end of epoch 1")
EVALUATION = Meeting(place="exchange/evaluations", number=1, what="evaluate_together() on all ranks")


class DictStore:
    """A store in which nobody else writes: a wait for a missing key times out at once."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def are_set(self, keys: list[str], *, limit_s: float) -> bool:
        return self.check(keys)

    def delete_key(self, key: str) -> None:
        self.values.pop(key, None)


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossed_waits, "FIRST_TURN_S", 1e-4)
    monkeypatch.setattr(crossed_waits, "LONGEST_TURN_S", 1e-4)


def wait(store: DictStore, meeting: Meeting, *, rank: int, reached: Mapping[str, int]) -> None:
    store.set(meeting.key(rank), "null")
    await_all(store, meeting, rank=rank, world_size=2, reached={meeting.place: meeting.number, **reached}, limit_s=0.01)


@pytest.mark.parametrize("rank", [0, 1])
def test_both_ranks_are_told_the_same(rank: int) -> None:
    store = DictStore()
    mine, other = (EVALUATION, EPOCH_END) if rank == 0 else (EPOCH_END, EVALUATION)
    announce(store, other, rank=1 - rank)
    with pytest.raises(ConfigError) as caught:
        wait(store, mine, rank=rank, reached={})
    assert str(caught.value) == (
        "rank 0 waits for evaluate_together() on all ranks, rank 1 for the end of epoch 1: they would never meet\n"
        "hint: call the methods of a session on every rank, in the same order and outside of the loop over batches(); "
        "under `if s.is_main:` use evaluate() instead of evaluate_together(); leave loops together: "
        "if any(s.gather(stop)): break"
    )


def test_an_announcement_of_a_meeting_that_was_held_is_no_crossing() -> None:
    store = DictStore()
    announce(store, EPOCH_END, rank=1)
    with pytest.raises(
        WaitError, match=r"^rank 0 waited 0.01 s for evaluate_together\(\) on all ranks, rank 1 did not"
    ):
        wait(store, EVALUATION, rank=0, reached={EPOCH_END.place: EPOCH_END.number})


def test_a_rank_that_came_and_went_on_is_no_crossing() -> None:
    class Late(DictStore):
        def get(self, key: str) -> bytes:
            self.set(EVALUATION.key(1), "null")
            return super().get(key)

    store = Late()
    announce(store, EPOCH_END, rank=1)
    wait(store, EVALUATION, rank=0, reached={})


def test_ranks_that_meet_soon_write_nothing() -> None:
    store = DictStore()
    store.set(EVALUATION.key(1), "null")
    wait(store, EVALUATION, rank=0, reached={})
    assert sorted(store.values) == [EVALUATION.key(0), EVALUATION.key(1)]


# Loops that follow rank 0


def follows(store: DictStore, what: str) -> bool:
    return follow(store, what, rank=1, number=1, reached={"exchange/order": 3}, limit_s=9.0)  # type: ignore[arg-type]


def test_a_rank_follows_to_the_place_that_rank_0_tells() -> None:
    store = DictStore()
    lead(store, "the end of epoch 1", number=1)  # type: ignore[arg-type]
    assert [follows(store, what) for what in ("a pass over the data", "the end of epoch 1")] == [False, True]


def test_a_rank_does_not_follow_where_rank_0_waits_elsewhere() -> None:
    store = DictStore()
    elsewhere = Meeting(place="exchange/order", number=4, what="the end of the run")
    announce(store, elsewhere, rank=0)  # type: ignore[arg-type]
    assert not follows(store, "the end of epoch 1")


def test_words_of_rank_0_do_not_pile_up() -> None:
    store = DictStore()
    for number in range(1, 100):
        lead(store, "the end of epoch 1", number=number)  # type: ignore[arg-type]
    assert sorted(store.values) == ["lead/98", "lead/99"]
