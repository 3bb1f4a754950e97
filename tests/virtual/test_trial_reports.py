"""What the reports of a short run say, with numbers worked by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from outrider.errors import DataError
from outrider.virtual.trial_reports import (
    RankWindow,
    TrialReport,
    background_cost,
    count_reports,
    device_speed,
    epoch_end_ms,
    meeting_cost,
    read_trial,
    samples_per_s,
    steps_of,
    stretch_overhead_ms,
    stretch_speed,
    vary_apart,
)


def window(samples: int, compute_ms: float, **times: Any) -> RankWindow:
    return RankWindow(samples=samples, batches=times.pop("batches", 1), compute_ms=compute_ms, **times)


def report(*ranks: RankWindow, wall_ms: float | None = 10.0, kind: str = "shared") -> TrialReport:
    return TrialReport(kind=kind, wall_ms=wall_ms, ranks=ranks)


def line(t: float, *, seen: int = 0, kind: str = "shared", samples: int = 8) -> dict[str, Any]:
    rank = {"samples": samples, "batches": 1, "compute_ms": 5.0, "exposed_ms": 1.0}
    return {"t": t, "kind": kind, "seen": seen, "bytes": 400, "parameters": 100, "ranks": [rank]}


def write(folder: Path, lines: list[dict[str, Any]], *, end: str = "") -> None:
    (folder / "trial").mkdir()
    text = "".join(json.dumps(one) + "\n" for one in lines)
    (folder / "trial" / "rank0.jsonl").write_text(text + end)


def test_steps_of_two_sizes_tell_fixed_from_per_sample_cost() -> None:
    speed = device_speed([(10, 20.0), (20, 30.0)])
    assert (speed.per_sample_ms, speed.fixed_ms) == pytest.approx((1.0, 10.0))
    assert speed.jitter == pytest.approx(0.0, abs=1e-4)


def test_steps_of_one_size_cost_per_sample_only() -> None:
    speed = device_speed([(10, 20.0), (10, 20.0)], overhead_ms=3.0)
    assert (speed.per_sample_ms, speed.fixed_ms) == pytest.approx((2.0, 3.0))


def test_samples_never_look_free() -> None:
    # A slope of 0.02 ms is below a twentieth of 10 ms / 15 samples: 1/30 ms.
    speed = device_speed([(10, 9.9), (20, 10.1)])
    assert speed.per_sample_ms == pytest.approx(1 / 30, rel=1e-3)
    assert speed.fixed_ms == pytest.approx(9.5, rel=1e-3)


def test_a_hiccup_counts_as_four_usual_steps() -> None:
    # Nine steps of 10 ms and one of 1 s, which counts as 40 ms: 130 ms for 100 samples.
    steady = [report(window(10, 10.0), wall_ms=10.0)] * 9
    assert samples_per_s([*steady, report(window(10, 10.0), wall_ms=1000.0)]) == pytest.approx(100 / 0.130)


def test_the_mean_of_a_noisy_step_is_what_was_measured() -> None:
    speed = device_speed([(10, 8.0), (10, 12.0)] * 20)
    assert 0.15 < speed.jitter < 0.25
    assert speed.per_sample_ms * 10 < 10.0


def test_what_slows_all_ranks_at_once_is_no_jitter_between_them() -> None:
    reports = [report(window(10, ms), window(5, 2 * ms)) for ms in (8.0, 12.0, 9.0, 14.0, 8.0, 11.0)]
    alone = [device_speed(steps_of(reports, rank)) for rank in (0, 1)]
    assert all(speed.jitter > 0.2 for speed in alone)
    apart = vary_apart(alone, reports)
    assert [speed.jitter for speed in apart] == pytest.approx([0.0, 0.0], abs=1e-4)
    assert [speed.step_ms(n) for speed, n in zip(apart, (10, 5), strict=True)] == pytest.approx(
        [10.33, 20.67], rel=5e-3
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_jitter_of_each_rank_by_itself_stays(ranks: int) -> None:
    generator = Random(1)
    reports = [
        report(*[window(10, 10.0 * math.exp(generator.gauss(0.0, 0.15))) for _ in range(ranks)]) for _ in range(2000)
    ]
    alone = [device_speed(steps_of(reports, rank)) for rank in range(ranks)]
    assert [speed.jitter for speed in vary_apart(alone, reports)] == pytest.approx([0.15] * ranks, rel=0.05)


def test_one_rank_or_few_reports_keep_their_jitter() -> None:
    reports = [report(window(10, ms), window(10, ms)) for ms in (8.0, 12.0, 9.0)]
    speeds = tuple(device_speed(steps_of(reports, rank)) for rank in (0, 1))
    assert vary_apart(speeds, reports) == speeds
    assert vary_apart(speeds[:1], reports * 9) == speeds[:1]


def test_a_blocking_average_is_told_apart_from_steps_and_the_rest() -> None:
    # Steps of 10 and 6 ms, an average in which the later rank is for 2 ms and the earlier for 6; 1 ms is left over.
    first = report(window(8, 10.0, exposed_ms=2.0), window(8, 6.0, exposed_ms=6.0), wall_ms=13.0)
    cost = meeting_cost([first, first, first])
    assert (cost.average_ms, cost.overhead_ms) == pytest.approx((2.0, 1.0))


def test_what_is_left_over_is_shared_by_the_batches_of_a_window() -> None:
    one = report(window(40, 10.0, exposed_ms=2.0, batches=5), wall_ms=17.0, kind="average")
    assert meeting_cost([one, one]).overhead_ms == pytest.approx(1.0)


def test_an_average_in_the_background_costs_its_snapshot_and_what_it_lasts() -> None:
    # Of 3 ms exposed 1 ms waited; rank 1 joined last, and its average took 4 ms. 10 + 3 of 15 ms: 2 ms over 2 batches.
    fast = window(16, 10.0, batches=2, exposed_ms=3.0, waited_ms=1.0, average_ms=9.0)
    slow = window(8, 10.0, exposed_ms=2.0, average_ms=4.0)
    cost = background_cost([report(fast, slow, wall_ms=15.0, kind="background")] * 3)
    assert (cost.average_ms, cost.snapshot_ms, cost.overhead_ms) == pytest.approx((4.0, 2.0, 1.0))


def test_windows_count_as_their_mean_step_and_setup_does_not_count() -> None:
    reports = [report(window(30, 12.0, batches=3)), report(window(10, 99.0, setup_ms=90.0)), report(window(0, 0.0))]
    assert steps_of(reports, 0) == [(10, 4.0)]


def test_a_file_of_a_run_that_was_killed_is_read_up_to_its_half_line(tmp_path: Path) -> None:
    write(tmp_path, [{"schema_version": 1, "rank": 0}, *(line(0.01 * i) for i in range(8))], end='{"t": 9, "ki')
    told = read_trial(tmp_path, policy="sync", devices=["cpu"])
    assert (len(told.reports), told.parameters, told.peak_memory_bytes) == (8, 100, (None,))
    assert [one.wall_ms for one in told.reports[:3]] == [None, pytest.approx(10.0), pytest.approx(10.0)]
    assert count_reports(tmp_path) == 8


def test_time_between_two_epochs_does_not_count(tmp_path: Path) -> None:
    # 8 samples in 10 ms, and 500 ms between the epochs.
    lines = [line(0.01 * i + (0.5 if i >= 4 else 0.0), seen=0 if i < 4 else 32) for i in range(8)]
    write(tmp_path, [{"schema_version": 1, "rank": 0}, *lines, {"peak_memory_bytes": 7}])
    told = read_trial(tmp_path, policy="sync", devices=["cpu"])
    assert [one.is_first for one in told.reports] == [True, False, False, False, True, False, False, False]
    assert samples_per_s(told.reports) == pytest.approx(800)
    assert told.peak_memory_bytes == (7,)


def test_the_end_of_an_epoch_is_what_is_neither_step_nor_average() -> None:
    # Steps of 10 and 6 ms, an average of 2 ms and 1 ms of the rest; between two epochs there are 7 ms more.
    one = report(window(8, 10.0, exposed_ms=2.0), window(8, 6.0, exposed_ms=6.0), wall_ms=13.0)
    reports = [one, one, one, replace(one, wall_ms=20.0, is_first=True)] * 3
    assert epoch_end_ms(reports, meeting_cost(reports)) == pytest.approx(7.0)
    assert epoch_end_ms([one] * 4, meeting_cost([one] * 4)) == 0.0


def test_the_end_of_an_epoch_in_the_background_is_told_by_rank_0() -> None:
    # 10 ms of steps, a snapshot of 2 ms and 1 ms for each of 2 batches; at the end of an epoch rank 0 also waits 5 ms.
    fast = window(16, 10.0, batches=2, exposed_ms=3.0, waited_ms=1.0, average_ms=9.0)
    slow = window(8, 30.0, exposed_ms=1.0, average_ms=4.0)
    one = report(fast, slow, wall_ms=15.0, kind="background")
    reports = [one, replace(one, wall_ms=19.0, is_first=True)] * 4
    assert epoch_end_ms(reports, background_cost(reports)) == pytest.approx(5.5)


def test_epochs_of_one_average_each_are_measured_with_their_ends() -> None:
    # 16 samples every 20 ms: steps of 10 ms, an average of 2 ms, and the rest is the end of the epoch.
    one = report(window(8, 10.0, exposed_ms=2.0), window(8, 6.0, exposed_ms=6.0), wall_ms=20.0, kind="average")
    reports = [replace(one, is_first=True)] * 5
    cost = meeting_cost(reports)
    assert samples_per_s(reports) == pytest.approx(800)
    assert (cost.average_ms, cost.overhead_ms) == pytest.approx((2.0, 0.0))
    assert epoch_end_ms(reports, cost) == pytest.approx(8.0)
    assert background_cost([replace(one, is_first=True, kind="background")] * 3).overhead_ms == 0.0


def test_the_first_steps_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, [{"schema_version": 1, "rank": 0}, *(line(0.01 * i, samples=i) for i in range(40))])
    told = read_trial(tmp_path, policy="sync", devices=["cpu"])
    # A fifth of forty.
    assert told.of_kind("shared")[0].samples == 8
    assert told.of_kind("average") == ()


def test_too_few_reports_are_an_error_with_the_way_out(tmp_path: Path) -> None:
    write(tmp_path, [{"schema_version": 1, "rank": 0}, line(0.1), line(0.2)])
    with pytest.raises(DataError) as caught:
        read_trial(tmp_path, policy="async", devices=["cpu", "cpu@0.4"])
    assert caught.value.message == (
        "async on cpu,cpu@0.4 took 2 steps or averages before it ended, and 6 are needed to measure it"
    )
    assert caught.value.hint == "let the script train longer: more epochs, more samples or smaller batches"


def test_a_rank_alone_reports_several_steps_at_once(tmp_path: Path) -> None:
    lines = [line(0.1 * number, kind="confer") for number in range(3)]
    for own, batches in zip(lines, (1, 2, 3), strict=True):
        own["ranks"][0]["batches"] = batches
    write(tmp_path, [{"schema_version": 1, "rank": 0}, *lines])
    assert len(read_trial(tmp_path, policy="sync", devices=["cpu"]).reports) == 3
    (tmp_path / "trial" / "rank0.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines[:2]))
    with pytest.raises(DataError, match="took 3 steps or averages"):
        read_trial(tmp_path, policy="sync", devices=["cpu"])


def test_every_step_of_a_stretch_counts_and_what_is_no_step_is_told_apart() -> None:
    # One step of 4 ms, then ten of 2 ms each; 0.1 ms per step are something else.
    reports = [
        report(window(8, 4.0), wall_ms=4.1, kind="confer"),
        report(window(80, 20.0, batches=10), wall_ms=21.0, kind="confer"),
    ]
    assert stretch_overhead_ms(reports) == pytest.approx(0.1)
    speed = stretch_speed([reports])
    mean_ms = (speed.fixed_ms + 8 * speed.per_sample_ms) * math.exp(speed.jitter**2 / 2)
    assert mean_ms == pytest.approx(24 / 11 + 0.1, rel=1e-3)
    assert stretch_overhead_ms([replace(one, is_first=True) for one in reports]) == 0.0


def test_the_overhead_of_a_stretch_is_that_of_the_rank_that_worked() -> None:
    resting = window(0, 0.0, batches=0)
    stretch = report(resting, window(80, 20.0, batches=10), wall_ms=21.0, kind="confer")
    assert stretch_overhead_ms([stretch]) == pytest.approx(0.1)


def test_a_run_that_has_not_begun_has_no_reports(tmp_path: Path) -> None:
    assert count_reports(tmp_path) == 0
