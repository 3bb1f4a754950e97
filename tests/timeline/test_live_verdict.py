"""The verdict of the live page, from pulses that are made by hand: a delay is named on its rank, nothing else is."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.timeline.live_verdict import LiveVerdict, judge
from outrider.timeline.pulses import Pulse, joined

DEVICES = {0: "cuda:0", 1: "cuda:1", 2: "cpu", 3: "cpu"}
PERIOD_S = 0.5


def steady(
    end_s: float,
    *,
    batch_s: float = 0.02,
    data_s: float = 0.001,
    join_s: float = 0.0002,
    average_s: float = 0.003,
    waited_s: float = 0.0,
    per_average: int = 1,
    batch: int = 32,
) -> Pulse:
    """Half a second of a rank whose every batch takes so long."""
    whole_s = batch_s + data_s + (join_s + average_s) / per_average
    batches = PERIOD_S / whole_s
    averages = batches / per_average
    spent_s = {
        "compute": batches * batch_s,
        "data": batches * data_s,
        "join": averages * join_s,
        "average": averages * average_s,
    }
    return Pulse(
        end_s=end_s,
        seconds=PERIOD_S,
        phase="compute",
        spent_s=spent_s,
        samples=round(batches * batch),
        batches=max(1, round(batches)),
        averages=max(1, round(averages)),
        average_s=averages * average_s,
        waited_s=averages * waited_s,
    )


def history(*, until_s: float, since_s: float = 0.0, **kind: float) -> list[Pulse]:
    num = round((until_s - since_s) / PERIOD_S)
    return [steady(since_s + (i + 1) * PERIOD_S, **kind) for i in range(num)]  # type: ignore[arg-type]


def run_with(
    delayed: Mapping[int, Mapping[str, float]], *, ranks: int = 2, begun_s: float, now_s: float
) -> LiveVerdict:
    """A calm run in which some ranks change at `begun_s`; the others wait for them."""
    waits_s = 0.2 if delayed else 0.003
    pulses = {}
    for rank in range(ranks):
        kind = delayed.get(rank, {"average_s": waits_s, "waited_s": waits_s - 0.003})
        pulses[rank] = history(until_s=begun_s) + history(since_s=begun_s, until_s=now_s, **kind)
    return judge(pulses, now_s=now_s, devices=DEVICES, policy="sync")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("kind", "change"),
    [("data", {"data_s": 0.201}), ("compute", {"batch_s": 0.22}), ("link", {"join_s": 0.2})],
)
@pytest.mark.parametrize("after_s", [4.0, 6.0, 10.0, 60.0])
def test_a_delay_of_200_ms_is_named_on_its_rank(rank: int, kind: str, change: dict[str, float], after_s: float) -> None:
    verdict = run_with({rank: change}, begun_s=20.0, now_s=20.0 + after_s)
    assert (verdict.kind, verdict.rank, verdict.level) == (kind, rank, "problem")


@pytest.mark.parametrize(("kind", "change"), [("data", {"data_s": 0.201}), ("link", {"join_s": 0.2})])
def test_a_delay_from_the_first_second_on_is_named_too(kind: str, change: dict[str, float]) -> None:
    verdict = run_with({1: change}, begun_s=0.0, now_s=10.0)
    assert (verdict.kind, verdict.rank) == (kind, 1)


def test_one_of_four_ranks_is_named() -> None:
    verdict = run_with({2: {"batch_s": 0.22}}, ranks=4, begun_s=20.0, now_s=26.0)
    assert (verdict.kind, verdict.rank) == ("compute", 2)
    assert verdict.sentence.startswith("Rank 2 (cpu) computes")


def test_a_delay_once_per_window_is_named_although_it_is_rare() -> None:
    calm = {"compute": 0.47, "data": 0.01, "average": 0.02}
    held = {"compute": 0.27, "data": 0.01, "average": 0.02, "join": 0.2}
    pulses = {}
    for rank in (0, 1):
        pulses[rank] = [
            Pulse(
                end_s=(i + 1) / 2,
                seconds=0.5,
                phase="compute",
                spent_s=held if rank == 1 and i >= 40 and i % 6 == 0 else calm,
                samples=320,
                batches=10,
                averages=int(i % 6 == 0),
            )
            for i in range(60)
        ]
    verdict = judge(pulses, now_s=30.0)
    assert (verdict.kind, verdict.rank) == ("link", 1)


def test_a_slowdown_says_since_when_and_by_how_much() -> None:
    pulses = {
        0: history(until_s=30.0),
        1: history(until_s=20.0) + history(since_s=20.0, until_s=30.0, batch_s=0.034),
    }
    verdict = judge(pulses, now_s=30.0, clock=lambda at_s: f"12:03:{at_s:02.0f}")
    assert verdict.sentence == (
        "Rank 1 computes 70 % longer per sample since 12:03:20: look for another program on it, heat, or more work per "
        "sample."
    )
    assert verdict.evidence[0] == "34.2 ms per batch in forward and backward, 19.7 ms before"


def test_ranks_that_slow_down_together_have_one_reason() -> None:
    pulses = {rank: history(until_s=20.0) + history(since_s=20.0, until_s=30.0, batch_s=0.05) for rank in range(3)}
    verdict = judge(pulses, now_s=30.0)
    assert (verdict.kind, verdict.rank) == ("compute", None)
    assert len(verdict.evidence) == 3


def test_a_rank_that_is_held_up_on_a_busy_machine_is_named() -> None:
    """All ranks are slower, one of them ten times as much."""
    pulses = {
        rank: history(until_s=20.0) + history(since_s=20.0, until_s=30.0, batch_s=batch_s)
        for rank, batch_s in enumerate((0.05, 0.5, 0.04))
    }
    verdict = judge(pulses, now_s=30.0)
    assert (verdict.kind, verdict.rank) == ("compute", 1)


def test_smaller_batches_are_no_slowdown() -> None:
    """A policy that gives a rank a quarter of its batch: each sample costs more, each batch less."""
    pulses = {0: history(until_s=20.0) + history(since_s=20.0, until_s=30.0, batch_s=0.012, batch=8)}
    assert judge(pulses, now_s=30.0).kind == "fine"


def test_a_calm_run_is_called_fine_with_its_gain() -> None:
    verdict = judge({rank: history(until_s=20.0) for rank in (0, 1)}, now_s=20.0)
    assert (verdict.level, verdict.kind) == ("ok", "fine")
    assert "the second device brings 1.7" in verdict.sentence


def test_slow_averages_of_all_are_the_links() -> None:
    pulses = {rank: history(until_s=20.0) + history(since_s=20.0, until_s=30.0, average_s=0.2) for rank in (0, 1)}
    verdict = judge(pulses, now_s=30.0)
    assert (verdict.kind, verdict.rank) == ("averages", None)
    assert verdict.sentence == "Averages take 226 ms instead of 2.95 ms: the link between the ranks has become slow."


def test_equal_shares_on_unequal_devices_are_named() -> None:
    pulses = {0: history(until_s=20.0, average_s=0.043, waited_s=0.04), 1: history(until_s=20.0, batch_s=0.06)}
    verdict = judge(pulses, now_s=20.0, policy="sync")
    assert (verdict.kind, verdict.rank) == ("skew", 1)
    assert "policy balanced or async" in verdict.sentence


def test_a_rank_that_rests_is_told_with_the_reason() -> None:
    resting = [
        Pulse(end_s=(i + 1) * 0.5, seconds=0.5, phase="rest", phase_s=i / 2, spent_s={"rest": 0.5}) for i in range(40)
    ]
    verdict = judge({0: history(until_s=20.0), 1: resting}, now_s=20.0, reason="alone is faster")
    assert (verdict.kind, verdict.rank, verdict.evidence) == ("rest", 1, ("alone is faster",))


def test_a_rank_without_a_sign_of_life_comes_first() -> None:
    pulses = {0: history(until_s=40.0, data_s=0.2), 1: history(until_s=20.0)}
    verdict = judge(pulses, now_s=40.0, devices=DEVICES)
    assert (verdict.kind, verdict.rank) == ("silent", 1)
    assert verdict.sentence == "Rank 1 (cuda:1) has shown no sign of life for 20 s: look at its log."


def test_a_rank_that_is_stuck_is_named_and_not_those_that_wait_for_it() -> None:
    def waiting(phase: str) -> list[Pulse]:
        return [
            Pulse(end_s=20 + i / 2, seconds=0.5, phase=phase, phase_s=i / 2, spent_s={phase: 0.5}) for i in range(40)
        ]

    pulses = {0: history(until_s=19.5) + waiting("average"), 1: history(until_s=19.5) + waiting("data")}
    verdict = judge(pulses, now_s=39.5)
    assert (verdict.kind, verdict.rank) == ("stuck", 1)
    assert verdict.evidence == ("rank 0 waits for it",)


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("startup", "The ranks are being set up."),
        ("evaluation", "The ranks evaluate."),
        ("epoch boundary", "The ranks are between two epochs."),
    ],
)
def test_what_is_no_training_is_said(phase: str, words: str) -> None:
    pulses = {0: [Pulse(end_s=1.0, seconds=1.0, phase=phase, phase_s=1.0, spent_s={phase: 1.0})]}
    assert judge(pulses, now_s=1.0).sentence == words


def test_no_pulses_are_a_run_that_is_starting() -> None:
    assert judge({}, now_s=1.0).kind == judge({0: []}, now_s=1.0).kind == "starting"


kinds = st.fixed_dictionaries(
    {},
    optional={
        "batch_s": st.floats(0.001, 2.0),
        "data_s": st.floats(0.0, 2.0),
        "join_s": st.floats(0.0, 1.0),
        "average_s": st.floats(0.0, 1.0),
        "batch": st.integers(1, 512),
        "per_average": st.integers(1, 200),
    },
)


@given(st.lists(st.tuples(kinds, kinds), min_size=1, max_size=4), st.floats(0.0, 40.0), st.floats(0.0, 20.0))
def test_any_run_gets_one_sentence(ranks: list[tuple[dict, dict]], first_s: float, then_s: float) -> None:
    pulses = {
        rank: history(until_s=first_s, **before) + history(since_s=first_s, until_s=first_s + then_s, **after)
        for rank, (before, after) in enumerate(ranks)
    }
    verdict = judge(pulses, now_s=first_s + then_s, devices=DEVICES)
    assert verdict.level in ("ok", "notice", "problem")
    assert verdict.sentence.endswith(".")
    assert verdict.rank is None or verdict.rank in pulses


@given(st.floats(0.005, 0.1), st.floats(0.0, 0.0004), st.floats(0.0, 0.001), st.integers(1, 4))
def test_a_steady_run_without_waits_is_never_a_problem(
    batch_s: float, data_s: float, average_s: float, ranks: int
) -> None:
    kind = {"batch_s": batch_s, "data_s": data_s, "average_s": average_s}
    pulses = {rank: history(until_s=30.0, **kind) for rank in range(ranks)}
    assert judge(pulses, now_s=30.0).level == "ok"


def test_older_pulses_that_were_joined_say_the_same() -> None:
    known = {rank: history(until_s=20.0) for rank in (0, 1)}
    later = {0: history(since_s=20.0, until_s=26.0), 1: history(since_s=20.0, until_s=26.0, batch_s=0.22)}
    thin = {rank: [joined(one[i : i + 4]) for i in range(0, len(one), 4)] for rank, one in known.items()}
    verdicts = [judge({rank: before[rank] + later[rank] for rank in (0, 1)}, now_s=26.0) for before in (known, thin)]
    assert [(one.kind, one.rank) for one in verdicts] == [("compute", 1)] * 2
