"""Pages: self-contained, safe to open, small for long runs, and drawn by a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ConfigError
from outrider.timeline import web_page as page
from outrider.timeline.document import Timeline, load_timeline
from outrider.timeline.export_html import write_html
from outrider.timeline.lane_figure import as_bars, lanes_figure, parted, thin_series
from outrider.timeline.spans import Span

from .conftest import make_utilization

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def figures_of(path: Path) -> list[dict[str, Any]]:
    text = path.read_text().split('id="figures">')[1].split("</script>")[0]
    figures: list[dict[str, Any]] = json.loads(text)
    return figures


def long_run(folder: Path) -> Timeline:
    """Two ranks, 200 epochs of 60 windows, and 8,000 samples each."""
    windows = [
        {"t": i * 0.1 + 0.08, "rank": rank, "kind": "window", "window": i, "start": i * 0.1, "batches": 20,
         "samples": 1280, "compute_ms": 80.0}
        for i in range(12_000)
        for rank in (0, 1)
    ]  # fmt: skip
    ready = [{"t": 0.0, "rank": rank, "kind": "ready", "device": "cpu"} for rank in (0, 1)]
    utilization = make_utilization([90.0] * 8_000, [40.0] * 8_000)
    document = {"schema_version": 1, "utilization": utilization, "events": ready + windows}
    (folder / "timeline.json").write_text(json.dumps(document))
    return load_timeline(folder)


# The shell


def test_a_page_needs_nothing_from_a_network(timeline: Timeline, run_folder: Path) -> None:
    text = write_html(timeline, run_folder).read_text()
    assert re.findall(r'src="([^"]*)"', text) == ["plotly.min.js"]
    assert "http" not in text


def test_pages_of_a_folder_share_one_script(tmp_path: Path) -> None:
    section = page.PageSection(title="one", figures=[page.figure([{"type": "bar", "y": [1]}])])
    page.write_page(tmp_path, "a.html", "A", [section])
    page.write_page(tmp_path, "b.html", "B", [section])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.html", "plotly.min.js"]


def test_a_page_without_figures_needs_no_script(tmp_path: Path) -> None:
    page.write_page(tmp_path, "a.html", "A", [page.PageSection(title="one", html=page.table(["x"], [["1"]]))])
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]


def test_names_cannot_become_markup(tmp_path: Path) -> None:
    section = page.PageSection(
        title="<i>", html=page.table(["<b>"], [["</td>"]]), figures=[page.figure([{"name": "</script>"}])]
    )
    path = page.write_page(tmp_path, "a.html", "<script>alert(1)</script>", [section])
    assert path.read_text().count("<script>alert") == 0
    assert figures_of(path)[0]["data"][0]["name"] == "</script>"
    assert "<td>&lt;/td&gt;</td>" in path.read_text()


def test_numbers_that_json_does_not_know_become_null() -> None:
    assert page.script_json([float("nan"), float("inf"), 1.5]) == "[null,null,1.5]"


def test_without_plotly_the_error_names_the_install_command(
    timeline: Timeline, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as raised:
        write_html(timeline, run_folder)
    assert str(raised.value) == "charts need plotly, which is not installed\nhint: pip install 'outrider[report]'"
    assert not (run_folder / "timeline.html").exists()


def test_a_rank_has_the_same_colour_in_every_chart(timeline: Timeline, run_folder: Path) -> None:
    lanes, _, _, shares, _ = figures_of(write_html(timeline, run_folder))
    utilization = [trace for trace in lanes["data"] if trace.get("fill") == "tozeroy"]
    assert [trace["line"]["color"] for trace in utilization] == list(page.RANK_COLOURS[:2])
    assert [trace["marker"]["color"] for trace in shares["data"]] == list(page.RANK_COLOURS[:2])


def test_what_was_not_sampled_is_said(timeline: Timeline, run_folder: Path) -> None:
    unsampled = Timeline(name="run", events=timeline.events, record=timeline.record)
    assert "Nothing was sampled in this run" in write_html(unsampled, run_folder).read_text()


def test_slices_are_told_that_the_utilization_is_not_theirs_alone(timeline: Timeline) -> None:
    events = [event | {"device": "cuda:0%30"} if event["kind"] == "ready" else event for event in timeline.events]
    sliced = Timeline(name="run", events=events, record=timeline.record, utilization=timeline.utilization)
    titles = [note["text"] for note in lanes_figure(sliced)["layout"]["annotations"]]
    assert all("utilization of the whole GPU" in title for title in titles)
    assert not any("GPU" in note["text"] for note in lanes_figure(timeline)["layout"]["annotations"])


# Down-sampling


def test_the_page_of_a_long_run_stays_below_a_megabyte(tmp_path: Path) -> None:
    path = write_html(long_run(tmp_path), tmp_path)
    assert path.stat().st_size < 1_000_000


def test_bars_keep_every_second_of_their_spans(tmp_path: Path) -> None:
    spans = [span for span in long_run(tmp_path).spans if span.rank == 0 and span.name == "window"]
    bars = as_bars(spans, limit=500)
    assert len(bars) <= 501
    assert sum(bar.seconds for bar in bars) == pytest.approx(sum(span.seconds for span in spans))


def test_averages_of_shared_steps_are_drawn_after_the_compute_of_their_window() -> None:
    facts = {"batches": 4, "compute_ms": 300.0, "average_ms": 700.0}
    window = Span(rank=0, lane="compute", name="window", start_s=1.0, end_s=2.0, facts=facts)
    compute, averages = parted(window)
    assert (compute.lane, compute.start_s, compute.end_s) == ("compute", 1.0, pytest.approx(1.3))
    assert (averages.lane, averages.start_s, averages.end_s) == ("average", pytest.approx(1.3), 2.0)


def test_a_window_without_averages_of_its_own_is_drawn_whole() -> None:
    window = Span(rank=0, lane="compute", name="window", start_s=1.0, end_s=2.0, facts={"batches": 4})
    assert list(parted(window)) == [window]


def test_few_spans_are_drawn_one_by_one() -> None:
    spans = [Span(rank=0, lane="wait", name="data", start_s=i, end_s=i + 0.5) for i in range(3)]
    assert [(bar.start_s, bar.seconds) for bar in as_bars(spans, limit=3)] == [(0, 0.5), (1, 0.5), (2, 0.5)]


def test_samples_become_the_mean_of_those_that_are_known() -> None:
    assert thin_series([1, 2, 3, 4, 5], [10.0, 20.0, None, 40.0, None], limit=3) == ([2, 4, 5], [15.0, 40.0, None])


# A real browser


@pytest.mark.skipif(BROWSER is None, reason="no chromium installed: apt-get install chromium")
def test_a_browser_draws_the_page_without_errors(timeline: Timeline, run_folder: Path) -> None:
    path = write_html(timeline, run_folder)
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={run_folder / 'profile'}", "--virtual-time-budget=10000", "--dump-dom", path.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in shown.stderr
    assert shown.stdout.count("js-plotly-plot") == 5
    # Lanes, learning and shares: bars and lines that are really there.
    assert len(re.findall(r'<g class="point"', shown.stdout)) > 20
    assert len(re.findall(r'class="js-line"', shown.stdout)) >= 6
    assert "rank 1" in shown.stdout


@pytest.mark.skipif(BROWSER is None, reason="no chromium installed: apt-get install chromium")
def test_a_page_says_so_when_its_script_is_missing(timeline: Timeline, run_folder: Path) -> None:
    path = write_html(timeline, run_folder)
    (run_folder / "plotly.min.js").unlink()
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu"]
    command += [f"--user-data-dir={run_folder / 'profile'}", "--virtual-time-budget=10000", "--dump-dom", path.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (
        '<p class="missing" id="missing" role="alert">The charts of this page are not shown: the file' in shown.stdout
    )
    assert "data-figure=" not in shown.stdout


def test_the_message_about_a_missing_script_is_hidden_until_it_is_needed(timeline: Timeline, run_folder: Path) -> None:
    assert '<p class="missing" id="missing" role="alert" hidden>' in write_html(timeline, run_folder).read_text()
