"""Timed and untimed runs of one model in one report: quality of these, speed of those, and what is said about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.bench.report.charts import learning_figures
from outrider.bench.report.claims import AS_GOOD, best_mode, quality
from outrider.bench.report.markdown import make_report, markdown
from outrider.bench.report.report_page import write_report_page
from outrider.bench.report.validate import NOT_COMPARED, SAME, compare, make_baseline
from outrider.bench.suite.groups import Group, group_runs
from outrider.bench.suite.runs import Subject, read_run, read_runs
from outrider.bench.suite.suite_summary import ModeSummary, document, summarise_group
from outrider.bench.suite.suite_text import render_again, render_runs

TellRun = Callable[..., Path]
CIFAR = Subject(metric="accuracy", larger_is_better=True, is_stand_in=False, target=0.97, published=0.975)
TIMED_SPEEDS = {"solo-0": 1000.0, "solo-1": 400.0, "independent": 1386.0, "cpu-async": 1330.0, "ddp": 800.0}
FINALS = (0.980, 0.981, 0.979)


def tell_timed(tell_run: TellRun) -> None:
    """Two rounds of three epochs, alone; an evaluation so early is of no worth."""
    for mode, speed in TIMED_SPEEDS.items():
        evals = (None,) * 3 if mode == "independent" else (0.1, 0.2, 0.3)
        for seed in range(2):
            tell_run(mode, seed, epochs=3, speed=speed, evals=evals, subject=CIFAR, data_name="CIFAR-10")


def tell_untimed(tell_run: TellRun, *modes: str) -> None:
    """Three seeds of five epochs, so slow beside each other that no number of theirs may be seen."""
    for mode in modes:
        for seed, final in enumerate(FINALS):
            evals = (0.5, 0.6, 0.7, 0.97, final)
            tell_run(mode, seed, epochs=5, speed=7.0, evals=evals, subject=CIFAR, data_name="CIFAR-10", is_timed=False)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def both(tell_run: TellRun, runs: Path) -> Path:
    """ddp was timed only, cpu-cadence was not timed."""
    tell_timed(tell_run)
    tell_untimed(tell_run, "solo-0", "solo-1", "cpu-async", "cpu-cadence")
    return runs


@pytest.fixture
def untimed(tell_run: TellRun, runs: Path) -> Path:
    tell_untimed(tell_run, "solo-0", "cpu-async")
    return runs


def only_group(root: Path) -> tuple[Group, dict[str, ModeSummary]]:
    [group] = group_runs(read_runs(root))
    return group, summarise_group(group)


def row_of(mode: str, text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"| {mode} |"))


# Numbers


def test_quality_is_of_the_untimed_runs_and_speed_of_the_timed_ones(both: Path) -> None:
    _, summaries = only_group(both)
    one = summaries["cpu-async"]
    assert (one.epochs, one.seeds, one.evals) == (5, (0, 1, 2), FINALS)
    assert one.speeds == pytest.approx((1330.0, 1330.0))
    assert (one.efficiency, one.speedup) == (pytest.approx(0.95), pytest.approx(1.33))
    assert (one.of_ceiling, one.averages) == (pytest.approx(1330 / 1386), 30.0)


def test_time_to_target_is_epochs_of_the_untimed_run_times_seconds_of_the_timed_ones(both: Path) -> None:
    _, summaries = only_group(both)
    # The fourth epoch got there; an epoch has 1,000 samples, and the first, twice as slow, is not counted.
    assert summaries["cpu-async"].epochs_to_target == (4, 4, 4)
    assert summaries["cpu-async"].times_to_target_s == pytest.approx((4 * 1000 / 1330,) * 3)


def test_a_mode_that_was_not_timed_has_quality_only(both: Path) -> None:
    _, summaries = only_group(both)
    one = summaries["cpu-cadence"]
    assert (one.evals, one.num_reached) == (FINALS, 3)
    assert (one.samples_per_s, one.efficiency, one.speedup, one.time_to_target_s) == (None, None, None, None)
    assert (one.average_ms, one.exposed_average_fraction, one.wait_fraction, one.idle_s) == (None, None, None, None)


def test_a_mode_that_was_timed_only_has_no_quality(both: Path) -> None:
    _, summaries = only_group(both)
    assert summaries["ddp"].evals == ()
    assert summaries["ddp"].samples_per_s == pytest.approx(800.0)


def test_timed_runs_as_long_as_the_untimed_ones_are_judged_where_there_are_no_others(
    tell_run: TellRun, runs: Path
) -> None:
    tell_run("solo-0", evals=(0.9, 0.95, 0.96))
    tell_run("ddp", evals=(0.9, 0.95, 0.97))
    tell_run("solo-0", evals=(0.9, 0.95, 0.98), is_timed=False)
    _, summaries = only_group(runs)
    assert (summaries["solo-0"].evals, summaries["ddp"].evals) == ((0.98,), (0.97,))


def test_the_document_says_null_where_nothing_was_timed(untimed: Path) -> None:
    told = document(group_runs(read_runs(untimed)))["lenet"]
    assert (told["ideal_samples_per_s"], told["timed_epochs"]) == (None, None)
    one = told["modes"]["cpu-async"]
    assert (one["eval"]["mean"], one["epochs_to_target"], one["target_reached"]) == (0.98, [4, 4, 4], 3)
    names = ("samples_per_s", "efficiency", "speedup", "time_to_target_s", "averages", "average_ms", "idle_s")
    assert {one[name] for name in names} == {None}


def test_the_document_says_how_many_runs_were_timed(both: Path) -> None:
    told = document(group_runs(read_runs(both)))["lenet"]
    assert {mode: one["num_timed"] for mode, one in told["modes"].items()} == {
        "solo-0": 2,
        "solo-1": 2,
        "independent": 2,
        "ddp": 2,
        "cpu-cadence": 0,
        "cpu-async": 2,
    }
    assert (told["timed_epochs"], told["modes"]["cpu-async"]["epochs"]) == (3, 5)


# Claims


def test_as_good_as_solo_is_said_of_the_untimed_runs(both: Path) -> None:
    assert {one.mode: one.verdict for one in quality(*only_group(both))} == {
        "cpu-cadence": AS_GOOD,
        "cpu-async": AS_GOOD,
    }


def test_the_best_mode_is_the_soonest_of_those_that_were_timed(both: Path) -> None:
    best = best_mode(*only_group(both))
    assert (best.mode, best.reason) == (
        "cpu-async",
        "soonest at the target in every seed, of those that were timed",
    )


def test_without_timed_runs_the_best_mode_is_the_one_that_learned_most(untimed: Path) -> None:
    assert best_mode(*only_group(untimed)).reason == "not timed; best evaluation"


def test_a_mode_that_missed_the_target_is_told_where_nothing_was_timed(tell_run: TellRun, untimed: Path) -> None:
    tell_run("ddp", epochs=5, evals=(0.5,) * 5, subject=CIFAR, data_name="CIFAR-10", is_timed=False)
    text = markdown(make_report(untimed))
    assert "- `ddp` on lenet: the target was reached in 0 of 1 seeds, by solo-0 in all" in text.splitlines()


# The text


def test_the_table_has_both_and_a_note_says_so(both: Path) -> None:
    text = markdown(make_report(both))
    assert row_of("cpu-async", text) == (
        "| cpu-async | 98.00 ± 0.25 % | 1,330 | 0.95 (0.95 to 0.95) | 0.96 | 1.33x | 3.0 s | 3% |"
    )
    assert row_of("cpu-cadence", text) == "| cpu-cadence | 98.00 ± 0.25 % | - | - | - | - | - | - |"
    assert row_of("ddp", text) == "| ddp | - | 800 | 0.57 (0.57 to 0.57) | 0.58 | 0.80x | - | 3% |"
    assert (
        "\n\nQuality is of runs that trained beside each other and were not timed, 5 epochs each; speed, waiting and "
        "averages are of runs that had the machine to themselves, 3 epochs each. Time to target is worked out from "
        "both: the epochs that the untimed run took to get there, times the median seconds of an epoch of the timed "
        "runs, warm-up excluded. Not timed, so with a dash for speed: cpu-cadence. Timed only, and not long enough to "
        "be judged: ddp.\n\n"
    ) in text


def test_the_conditions_name_both_lengths_and_the_published_figure_is_held_against_the_long_runs(both: Path) -> None:
    text = markdown(make_report(both))
    assert (
        "CIFAR-10; 5 epochs for quality and 3 for speed, batch 64; devices cpu, cpu@0.4; up to 3 seeds for quality "
        "and 2 for speed per mode. Ideal: 1,400 samples/s, the sum of solo-0 + solo-1. Published: accuracy 97.50 %; "
        "reached, in the mean, by every mode that was judged."
    ) in text.splitlines()


def test_both_kinds_of_runs_are_reproduced_by_a_line_of_their_own(both: Path) -> None:
    assert markdown(make_report(both)).split("```\n")[1].splitlines() == [
        "outrider bench sweep --preset full --models lenet --modes solo-0,solo-1,independent,cpu-async,ddp "
        "--devices cpu,cpu@0.4 --seeds 2 --epochs 3 --batch-size 64 --samples 2000",
        "outrider bench sweep --preset full --models lenet --modes solo-0,solo-1,cpu-cadence,cpu-async "
        "--devices cpu,cpu@0.4 --seeds 3 --epochs 5 --batch-size 64 --samples 2000 --jobs 2",
    ]


def test_untimed_runs_alone_show_quality_and_a_dash_for_the_rest(untimed: Path) -> None:
    text = markdown(make_report(untimed))
    assert row_of("cpu-async", text) == "| cpu-async | 98.00 ± 0.25 % | - | - | - | - | - | - |"
    assert (
        "These runs trained beside each other and were not timed: a dash stands for all that is a matter of speed."
    ) in text.splitlines()
    assert "### Averages and anchors" not in text
    assert "### Idle by cause" not in text
    assert text.splitlines()[2].startswith("6 finished runs, 6 of them for quality only and not timed; models: lenet;")


def test_the_text_that_ends_a_sweep_says_that_nothing_was_timed(untimed: Path) -> None:
    lines = render_runs(read_runs(untimed)).splitlines()
    assert lines[4] == "cpu-async  98.00 ± 0.25          -       -         -          -"
    assert lines[-1] == "these runs trained beside each other and were not timed"


def test_a_repetition_says_nothing_of_the_speed_of_an_untimed_run(tell_run: TellRun) -> None:
    before, now = read_run(tell_run(is_timed=False)), read_run(tell_run())
    assert before is not None
    assert now is not None
    assert render_again(before, now).splitlines()[2:4] == [
        "before  0.980000  0.333333          -",
        "now     0.980000  0.333333      1,000",
    ]


# The page


def test_curves_against_wall_time_run_at_the_pace_of_the_timed_runs(both: Path) -> None:
    group, _ = only_group(both)
    against_epochs, against_time, *_ = learning_figures(group)
    assert [line["name"] for line in against_epochs["data"]] == ["solo-0", "solo-1", "cpu-cadence", "cpu-async"]
    curves = {line["name"]: line["x"] for line in against_time["data"]}
    assert list(curves) == ["solo-0", "solo-1", "cpu-async"]
    assert curves["solo-0"] == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0])


def test_without_timed_runs_nothing_is_drawn_against_time(untimed: Path) -> None:
    group, _ = only_group(untimed)
    assert [drawn["layout"]["title"]["text"] for drawn in learning_figures(group)] == [
        "Evaluation (accuracy) against epochs",
        "Training loss against epochs",
    ]


def test_the_page_says_which_runs_were_not_timed(both: Path) -> None:
    text = write_report_page(make_report(both), both).read_text()
    assert text.count("<td>not timed</td>") == 12
    assert "Time to target is worked out from both" in text


# Comparing with before


def test_speed_is_compared_with_timed_runs_only(both: Path) -> None:
    baseline = make_baseline(group_runs(read_runs(both)))
    assert baseline["models"]["lenet"]["modes"]["cpu-cadence"] == {"eval": list(FINALS), "samples_per_s": []}
    found = compare(group_runs(read_runs(both)), baseline)
    assert {(one.mode, one.measure): one.verdict for one in found if one.mode in ("cpu-async", "cpu-cadence")} == {
        ("cpu-cadence", "samples_per_s"): NOT_COMPARED,
        ("cpu-cadence", "accuracy"): SAME,
        ("cpu-async", "samples_per_s"): SAME,
        ("cpu-async", "accuracy"): SAME,
    }
    [reason] = {one.reason for one in found if one.mode == "cpu-cadence" and one.verdict == NOT_COMPARED}
    assert reason == "its speed was not timed before nor now"


def test_speed_measured_over_another_number_of_epochs_is_another_condition(both: Path) -> None:
    baseline = make_baseline(group_runs(read_runs(both)))
    assert baseline["models"]["lenet"]["condition"]["epochs"] == 5
    assert baseline["models"]["lenet"]["condition"]["timed_epochs"] == 3
