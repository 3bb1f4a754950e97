"""The report from records: what is claimed and what is not, in words and on a page, without torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.bench.report.charts import efficiency_figure, learning_figures, thinned
from outrider.bench.report.claims import AS_GOOD, BETTER, NO_EVIDENCE, TOO_FEW, WORSE, best_mode, quality
from outrider.bench.report.markdown import make_report, markdown
from outrider.bench.report.model_tables import anchor_history
from outrider.bench.report.report_page import write_report_page
from outrider.bench.suite.groups import Group, group_runs
from outrider.bench.suite.runs import Subject, SuiteRun, read_runs
from outrider.bench.suite.suite_summary import ModeSummary, document, summarise_group
from outrider.bench.suite.suite_text import runs_document
from outrider.errors import DataError, MissingExtraError

TellRun = Callable[..., Path]

WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NoTorch())
from outrider.cli.main import app
app(["bench", "report", sys.argv[1], "--html"], standalone_mode=False)
"""
SOLO = (0.980, 0.981, 0.979)
MNIST = Subject(metric="accuracy", larger_is_better=True, is_stand_in=False, target=0.97, published=0.985)
LOSS = Subject(metric="loss", larger_is_better=False, is_stand_in=True, target=1.5)


def tell_three(tell_run: TellRun, mode: str, finals: tuple[float, ...], **options: object) -> None:
    for seed, final in enumerate(finals):
        tell_run(mode, seed, evals=(0.9, 0.95, final), **options)


def only_group(root: Path) -> tuple[Group, dict[str, ModeSummary]]:
    [group] = group_runs(read_runs(root))
    return group, summarise_group(group)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def pair(tell_run: TellRun, runs: Path) -> Path:
    """Two solos, the ceiling and one policy, three seeds each."""
    tell_three(tell_run, "solo-0", SOLO)
    tell_three(tell_run, "solo-1", SOLO, speed=400.0)
    for seed in range(3):
        tell_run("independent", seed, speed=1386.0, evals=(None, None, None))
    tell_three(tell_run, "cpu-async", (0.981, 0.980, 0.982), speed=1330.0)
    return runs


# Numbers


def test_efficiency_is_against_the_sum_of_the_solos_and_speed_up_against_the_first(pair: Path) -> None:
    _, summaries = only_group(pair)
    one = summaries["cpu-async"]
    assert one.efficiency == pytest.approx(1330 / 1400)
    assert one.of_ceiling == pytest.approx(1330 / 1386)
    assert one.speedup == pytest.approx(1.33)


def test_without_every_solo_there_is_no_efficiency(tell_run: TellRun, runs: Path) -> None:
    tell_run("solo-0")
    tell_run("cpu-async")
    _, summaries = only_group(runs)
    assert summaries["cpu-async"].efficiency is None


def test_the_time_to_target_is_known_only_where_every_seed_got_there(tell_run: TellRun, runs: Path) -> None:
    tell_run("solo-0", 0, evals=(0.9, 0.96, 0.98))
    tell_run("solo-0", 1, evals=(0.9, 0.96, 0.969))
    _, summaries = only_group(runs)
    assert (summaries["solo-0"].time_to_target_s, summaries["solo-0"].num_reached) == (None, 1)


def test_the_document_has_every_number_by_model_and_mode(pair: Path) -> None:
    told = document(group_runs(read_runs(pair)))["lenet"]
    assert list(told["modes"]) == ["solo-0", "solo-1", "independent", "cpu-async"]
    one = told["modes"]["cpu-async"]
    assert one["eval"]["values"] == [0.981, 0.98, 0.982]
    assert one["eval"]["mean"] == 0.981
    assert one["eval"]["ci95"] == [0.978516, 0.983484]
    assert (one["samples_per_s"], one["efficiency"], one["speedup"]) == (1330.0, 0.95, 1.33)
    assert (one["averages"], one["average_ms"], one["exposed_average_fraction"]) == (30.0, 12.5, 0.02)
    assert (one["idle_s"], one["epochs"], one["time_to_target_s"]) == (0.9, 3, 3.008)


def test_without_scipy_a_sweep_ends_without_its_table_and_a_report_says_what_to_install(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    assert runs_document(read_runs(pair), failures=())["models"] is None
    with pytest.raises(MissingExtraError) as caught:
        markdown(make_report(pair))
    assert str(caught.value).splitlines() == [
        "intervals and tests need scipy, which is not installed",
        "hint: pip install 'outrider[bench]'",
    ]


def test_a_ceiling_has_no_evaluation(pair: Path) -> None:
    told = document(group_runs(read_runs(pair)))["lenet"]["modes"]["independent"]
    assert told["eval"] == {"mean": None, "ci95": None, "values": []}


# Claims


@pytest.mark.parametrize(
    ("finals", "verdict"),
    [
        ((0.981, 0.980, 0.982), AS_GOOD),
        ((0.950, 0.951, 0.949), WORSE),
        ((0.995, 0.996, 0.994), BETTER),
        ((0.999, 0.950, 0.985), NO_EVIDENCE),
        ((0.950, 0.951), TOO_FEW),
    ],
    ids=["as good", "worse", "better", "noisy", "two seeds"],
)
def test_a_claim_needs_its_test(tell_run: TellRun, runs: Path, finals: tuple[float, ...], verdict: str) -> None:
    tell_three(tell_run, "solo-0", SOLO)
    tell_three(tell_run, "cpu-async", finals)
    [judged] = quality(*only_group(runs))
    assert judged.verdict == verdict


def test_a_smaller_loss_is_better(tell_run: TellRun, runs: Path) -> None:
    tell_three(tell_run, "solo-0", (1.60, 1.61, 1.59), subject=LOSS)
    tell_three(tell_run, "cpu-async", (1.40, 1.41, 1.39), subject=LOSS)
    [judged] = quality(*only_group(runs))
    assert judged.verdict == BETTER


def test_the_best_mode_is_the_soonest_at_the_target(tell_run: TellRun, pair: Path) -> None:
    tell_three(tell_run, "ddp", (0.980, 0.981, 0.979), speed=800.0)
    assert best_mode(*only_group(pair)).mode == "cpu-async"


def test_a_mode_worse_than_solo_is_never_the_best(tell_run: TellRun, pair: Path) -> None:
    tell_three(tell_run, "cpu-cadence", (0.9705, 0.9706, 0.9707), speed=5000.0)
    assert best_mode(*only_group(pair)).mode == "cpu-async"


# The text


def test_it_says_plainly_where_a_mode_is_worse_than_solo(tell_run: TellRun, pair: Path) -> None:
    tell_three(tell_run, "ddp", (0.950, 0.951, 0.949), speed=800.0)
    section = markdown(make_report(pair)).split("## Where a mode is worse than one device alone")[1]
    assert section.splitlines()[2] == (
        "- `ddp` on lenet: fewer samples per second than solo-0 (0.80x); the target was reached in 0 of 3 seeds, "
        "by solo-0 in all; worse evaluation, by 3.00 points"
    )


def test_it_says_so_where_nothing_is_worse(pair: Path) -> None:
    text = markdown(make_report(pair))
    assert "## Where a mode is worse than one device alone\n\nNowhere in these runs, as far as they can tell." in text


def test_the_reproduce_line_names_everything(pair: Path) -> None:
    block = markdown(make_report(pair)).split("```\n")[1]
    assert block == (
        "outrider bench sweep --preset full --models lenet --modes solo-0,solo-1,independent,cpu-async "
        "--devices cpu,cpu@0.4 --seeds 3 --epochs 3 --batch-size 64 --samples 2000\n"
    )


def test_a_stand_in_is_named_and_held_against_nothing(pair: Path) -> None:
    text = markdown(make_report(pair))
    assert "The data are a stand-in: no published figure applies." in text
    assert "glyphs (stand-in), first 2,000: made by the program, not the data set; only its own runs compare." in text
    assert "Published" not in text


def test_real_data_are_held_against_the_published_figure(tell_run: TellRun, runs: Path) -> None:
    tell_three(tell_run, "solo-0", SOLO, subject=MNIST, data_name="MNIST")
    tell_three(tell_run, "cpu-async", (0.99, 0.99, 0.991), subject=MNIST, data_name="MNIST")
    assert "Published: accuracy 98.50 %; not reached, in the mean, by solo-0." in markdown(make_report(runs))


def test_runs_that_are_not_finished_are_listed_with_their_reason(tell_run: TellRun, pair: Path) -> None:
    tell_run(
        "nccl-async",
        evals=(0.9,),
        status="failed",
        record_fields={"error": {"message": "rank 0 (cuda:0), step 7: ValueError: no"}},
    )
    text = markdown(make_report(pair))
    assert "- lenet nccl-async seed 0: failed after 1 of 3 epochs: rank 0 (cuda:0), step 7: ValueError: no" in text


def test_the_setting_of_a_peer_is_stated(tell_run: TellRun, pair: Path) -> None:
    tell_run("ddp", record_fields={"options": {"note": "at its defaults"}})
    assert "- `ddp`: at its defaults." in markdown(make_report(pair)).splitlines()


def test_unlike_machines_in_one_folder_are_told(tell_run: TellRun, pair: Path) -> None:
    tell_run("ddp", environment={"cpu": "another"})
    assert "Runs of unlike machines or versions are in this folder" in markdown(make_report(pair))


def test_idle_time_is_shown_as_recorded_and_as_sampled(pair: Path) -> None:
    lines = markdown(make_report(pair)).splitlines()
    assert "| mode | data | average | sum | sampled |" in lines
    assert "| cpu-async | 0.15 | 0.75 | 0.90 | 6.50, most of it startup |" in lines


def test_memory_is_shown_by_rank(pair: Path) -> None:
    assert "| cpu-async | 0.50 | 1.00 |" in markdown(make_report(pair)).splitlines()


def test_a_long_history_of_the_anchor_loses_its_middle() -> None:
    assert anchor_history(range(20, 40)) == "20 → 21 → 22 → 23 → … 12 more … → 36 → 37 → 38 → 39"


@pytest.mark.parametrize(("num_begun", "count"), [(0, "no run of the suite is there"), (2, "2 runs begun")])
def test_nothing_finished_is_an_error(tell_run: TellRun, runs: Path, num_begun: int, count: str) -> None:
    runs.mkdir()
    for seed in range(num_begun):
        tell_run("solo-0", seed, status="closed")
    with pytest.raises(DataError) as caught:
        make_report(runs)
    assert caught.value.message == f"nothing is finished in {runs}: {count}"
    assert caught.value.hint == "run `outrider bench sweep`; it goes on where it stopped"


def test_the_report_and_its_page_need_no_torch(pair: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, str(pair)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("# Benchmark report\n")
    assert (pair / "report.md").read_text() == ended.stdout


# The page


def test_the_ideal_is_drawn_into_the_efficiency_bars(pair: Path) -> None:
    _, summaries = only_group(pair)
    drawn = efficiency_figure(summaries)
    assert drawn["data"][0]["y"] == ["independent", "cpu-async"]
    assert [line["x0"] for line in drawn["layout"]["shapes"]] == [1.0, pytest.approx(1386 / 1400)]


def test_learning_is_drawn_against_epochs_and_wall_time(pair: Path) -> None:
    group, _ = only_group(pair)
    titles = [drawn["layout"]["title"]["text"] for drawn in learning_figures(group)]
    assert titles == [
        "Evaluation (accuracy) against epochs",
        "Evaluation (accuracy) against wall time",
        "Training loss against epochs",
        "Training loss against wall time",
    ]
    assert learning_figures(group)[1]["data"][0]["x"] == [pytest.approx(2.1), pytest.approx(3.1), pytest.approx(4.1)]


def test_long_curves_are_thinned_and_keep_their_ends(pair: Path) -> None:
    [run, *_] = read_runs(pair)
    rows = [(run.epochs[0],)] + [(run.epochs[1],)] * 500 + [(run.epochs[2],)]
    kept = thinned(rows, 200)
    assert (len(kept), kept[0], kept[-1]) == (200, rows[0], rows[-1])


def test_the_page_escapes_what_runs_say(tell_run: TellRun, pair: Path) -> None:
    tell_run("ddp", status="failed", record_fields={"error": {"message": "<script>alert(1)</script>"}})
    text = write_report_page(make_report(pair), pair).read_text()
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


def test_the_page_links_to_runs_by_relative_paths(pair: Path) -> None:
    run: SuiteRun = read_runs(pair)[0]
    text = write_report_page(make_report(pair), pair).read_text()
    assert f'href="{run.folder.relative_to(pair)}"' in text
    assert str(pair) not in text


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a browser: chromium is not installed")
def test_a_browser_draws_every_chart_without_a_network(pair: Path, tmp_path: Path) -> None:
    page = write_report_page(make_report(pair), pair)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=10000", "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom", page.as_uri()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    # Efficiency, shares, four of learning, idle time: each becomes one drawing.
    assert ended.stdout.count('class="main-svg" xmlns') >= 7
