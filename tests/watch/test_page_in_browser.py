"""The live page in a real browser: it loads, moves, changes its verdict, and stays usable when narrow, dark or long."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_run import FakeRun

from outrider.watch.watch_server import WatchServer

CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="no browser: apt-get install chromium chromium-driver"
)
Serve = Callable[[Path], WatchServer]
PATIENCE_S = 60


class Page:
    """A browser with one page."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, server: WatchServer) -> None:
        self.driver.get(server.address)
        self.wait("document.body.dataset.views >= 1")

    def ask(self, expression: str) -> Any:
        return self.driver.execute_script(f"return {expression}")

    def wait(self, condition: str) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, PATIENCE_S).until(lambda driver: self.ask(condition), condition)

    def text(self, identifier: str) -> str:
        return str(self.ask(f"document.getElementById('{identifier}').textContent"))

    def resize(self, width: int, height: int = 900) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def problems(self) -> list[str]:
        """What the browser complained about: scripts, sources that the policy forbids, missing files."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = tmp_path / "profile"
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", f"user-data-dir={profile}"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield Page(driver)
    driver.quit()


def test_the_page_shows_a_run_and_follows_it(page: Page, fake_run: FakeRun, serve: Serve) -> None:
    page.open(serve(fake_run.folder))
    assert page.text("name") == "first"
    assert page.text("status") == "running"
    assert "nothing holds the run up" in page.text("sentence")
    assert page.ask("document.querySelectorAll('#lanes canvas').length") == 2
    assert page.ask("document.querySelectorAll('.uplot canvas').length") == 4
    points = "charts.rate.plot.data[0].length"
    before = page.ask(points)

    fake_run.run_for(6.0, spent_s={"compute": 0.1, "data": 0.4}, samples=80, batches=2)
    page.wait(
        "document.getElementById('sentence').textContent.startsWith('Rank 1 (cpu@0.5) waits 80 % of its time for data')"
    )
    assert page.ask("document.getElementById('verdict').dataset.kind") == "data"
    assert page.ask("document.getElementById('verdict').dataset.rank") == "1"
    page.wait(f"{points} === {before + 6}")

    fake_run.record("finished")
    page.wait("document.getElementById('status').textContent === 'finished'")
    assert page.problems() == []


def test_lanes_are_drawn_and_the_loss_can_be_shown_by_samples(page: Page, fake_run: FakeRun, serve: Serve) -> None:
    page.open(serve(fake_run.folder))
    inked = (
        "[...document.querySelectorAll('#lanes canvas')].map(c => c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data.some(v => v > 0))"
    )
    assert page.ask(inked) == [True, True]
    assert page.ask("charts.loss.plot.data[0].at(-1)") == 20
    page.ask("document.getElementById('by-samples').click()")
    assert page.ask("charts.loss.plot.data[0].at(-1)") == 19_200


def test_four_ranks_and_ten_thousand_pulses_stay_light(page: Page, tmp_path: Path, serve: Serve) -> None:
    run = FakeRun(tmp_path / "long", ranks=4, seconds_ago=1_250.0)
    run.run_for(1_250.0)
    page.open(serve(run.folder))
    assert page.ask("document.querySelectorAll('#lanes .lane').length") == 4
    assert page.ask("document.querySelectorAll('#ranks tr').length") == 5
    assert page.ask("charts.rate.plot.data.length") == 10
    assert page.ask("charts.rate.plot.data[0].length") <= 240
    assert page.ask("JSON.stringify(last).length") < 120_000


@pytest.mark.parametrize("width", [320, 390, 768, 1120, 1600])
def test_no_width_scrolls_sideways_or_cuts_numbers_off(page: Page, fake_run: FakeRun, serve: Serve, width: int) -> None:
    fake_run.event(0, kind="transport", value="shared memory", bytes=123_456_789)
    fake_run.event(0, kind="plan", value=[4, 2], reason="paces", anchor=1_234)
    fake_run.event(0, kind="average end", window=3, ms=4.0, drift=0.0012)
    fake_run.record("running", parameters=5)
    apart = FakeRun(fake_run.folder.parent / "apart")
    apart.record("finished", policy="independent", parameters=5, totals={"samples_per_s": 1_000.0})
    page.resize(width)
    page.open(serve(fake_run.folder))
    page.wait(f"charts.loss.plot.width <= {width}")
    assert page.ask("document.documentElement.scrollWidth") <= width
    cut = "[...document.querySelectorAll('.fact b')].filter(b => b.scrollWidth > b.clientWidth).map(b => b.textContent)"
    assert page.ask(cut) == []
    assert "123 MB" in page.text("facts")
    assert "of ceiling" in page.text("facts")


def test_dark_mode_changes_page_and_charts(page: Page, fake_run: FakeRun, serve: Serve) -> None:
    page.open(serve(fake_run.folder))
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.ask(ground), page.ask("colour('ink')")
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    page.wait(f"{ground} !== {json.dumps(light[0])}")
    page.wait(f"colour('ink') !== {json.dumps(light[1])}")


def test_another_run_can_be_chosen(page: Page, fake_run: FakeRun, serve: Serve) -> None:
    FakeRun(fake_run.folder.parent / "second", ranks=1).run_for(3.0)
    page.open(serve(fake_run.folder.parent))
    other = "first" if page.text("name") == "second" else "second"
    choose = f"s = document.getElementById('runs'); s.value = '{other}'; s.dispatchEvent(new Event('change'))"
    page.driver.execute_script(f"const {choose}")
    page.wait(f"document.getElementById('name').textContent === '{other}'")


def test_names_from_files_are_never_markup(page: Page, fake_run: FakeRun, serve: Serve) -> None:
    fake_run.event(0, kind="plan", value=[1, 1], reason="<img src=x onerror=alert(1)>", anchor=1)
    fake_run.record("running", policy="<b>bold</b>")
    page.open(serve(fake_run.folder))
    assert page.ask("document.querySelectorAll('#plan img, header b').length") == 0
    assert "<img src=x" in page.text("plan")


def test_a_server_that_ends_leaves_the_page_with_what_was_seen(page: Page, fake_run: FakeRun, serve: Serve) -> None:
    server = serve(fake_run.folder)
    page.open(server)
    server.stop()
    page.wait("document.getElementById('footer').textContent.startsWith('The page has ended')")
    assert page.text("status") == "disconnected"
    assert page.ask("charts.rate.plot.data[0].length") == 20
