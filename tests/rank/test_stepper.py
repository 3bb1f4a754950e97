"""When the stepper lets the clocks of a device begin anew, and when it keeps what they have measured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from outrider.policy.effects import OpenWindow
from outrider.rank.stepper import Stepper


@pytest.mark.parametrize(
    ("window", "expected"), [(None, ["restart"]), (OpenWindow(samples=2, unaccounted=2), ["skip pause"])]
)
def test_a_window_that_stays_open_keeps_the_costs_measured_so_far(
    window: OpenWindow | None, expected: list[str]
) -> None:
    told: list[str] = []
    meter = SimpleNamespace(restart_clocks=lambda: told.append("restart"), skip_pause=lambda: told.append("skip pause"))
    driver = SimpleNamespace(
        meter=meter,
        open_window=window,
        steps=lambda segment: (step for step in ()),
        averages=SimpleNamespace(wait_for_device=lambda: None),
    )
    replica = SimpleNamespace(captured=None, check_loss=lambda: None, check_finite=lambda: None)
    Stepper(driver, replica).run(segment=None)  # type: ignore[arg-type]
    assert told == expected
