"""Limits of memory in device specs, as diagnose and its forecast judge them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.machine.device_memory import judge_memory
from outrider.machine.devices import parse_devices
from outrider.machine.machine_facts import Facts, load_facts
from outrider.virtual.gain_forecast import forecast

FACTS = Path(__file__).parent / "facts"


@pytest.fixture
def facts() -> Facts:
    """Cards of 24 and 12 GiB in a host of 32 GiB."""
    return load_facts(FACTS / "rtx3090-rtx3060.json")


@pytest.mark.parametrize(
    ("devices", "told"),
    [
        ("cuda:0:8GiB", [("ok", "cuda:0:8GiB: 8.0 GiB of 24.0 GiB of memory")]),
        ("cuda:1,cpu", [("ok", "cuda:1: 12.0 GiB of memory"), ("ok", "cpu: 32.0 GiB of memory")]),
        ("cuda:1:13GiB", [("failure", "cuda:1:13GiB asks for more memory than there is")]),
        ("cpu:64GiB", [("failure", "cpu:64GiB asks for more memory than there is")]),
        ("cuda:2", [("failure", "cuda:2 is not there")]),
    ],
)
def test_every_device_gets_a_verdict(facts: Facts, devices: str, told: list[tuple[str, str]]) -> None:
    assert [(one.level, one.what) for one in judge_memory(facts, parse_devices(devices))] == told


def test_limits_of_one_card_add_up(facts: Facts) -> None:
    *_, last = judge_memory(facts, parse_devices("cuda:0%50:16GiB,cuda:0%50:16GiB"))
    assert (last.level, last.what) == ("failure", "the limits of cuda:0 add up to 32.0 GiB of 24.0 GiB")


def test_a_forecast_leaves_out_what_cannot_hold_the_model(facts: Facts) -> None:
    fits, small = (forecast(facts, parse_devices(f"cuda:0,cuda:1:{limit}")) for limit in ("8GiB", "400MiB"))
    assert fits is not None
    assert small is not None
    assert [one.memory_bytes for one in fits.devices] == [24 * 2**30, 8 * 2**30]
    assert fits.leave_out == ()
    assert small.leave_out == ("cuda:1:400MiB",)
    assert small.advice == "leave cuda:1:400MiB out: ResNet-50 needs 511 MB there; cuda:0 trains alone"


def test_a_forecast_counts_slices_by_their_share(facts: Facts) -> None:
    told = forecast(facts, parse_devices("cuda:0%50,cuda:0%25:4GiB"))
    assert told is not None
    assert [one.relative for one in told.devices] == pytest.approx([1.0, 0.5])


def test_diagnose_takes_devices_with_limits() -> None:
    command = ["diagnose", "--facts", str(FACTS / "rtx3090-rtx3060.json"), "--devices"]
    fine = CliRunner().invoke(app, [*command, "cuda:0,cuda:1:8GiB"])
    assert fine.exit_code == 0
    assert "cuda:1:8GiB" in fine.stdout
    assert CliRunner().invoke(app, [*command, "cuda:1:13GiB"]).exit_code == 1
    assert CliRunner().invoke(app, [*command, "cuda:1:lots"]).exit_code == 2
