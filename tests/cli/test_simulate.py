"""`outrider simulate`: questions as users write them, answers as a table or as JSON."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.errors import ConfigError
from outrider.virtual.what_if import parse_link, parse_speeds

NO_TORCH = """
import sys
from outrider.cli.main import app
app(["simulate", "--batches", "20"], standalone_mode=False)
heavy = {"torch", "numpy", "rich"} & set(sys.modules)
sys.exit(f"loaded to simulate: {heavy}" if heavy else 0)
"""


def simulated(*arguments: str) -> str:
    shown = CliRunner().invoke(app, ["simulate", "--batches", "50", *arguments])
    assert shown.exit_code == 0, shown.output
    return shown.stdout


def test_every_policy_has_a_line_that_fits_a_terminal() -> None:
    lines = simulated("--devices", "1x2000,0.4x2000", "--policy", "sync", "--model-mb", "12345678").splitlines()
    assert max(map(len, lines)) <= 80
    named = [line.split()[0] for line in simulated().splitlines()[3:]]
    assert named == ["auto", "sync", "balanced", "cadence", "async", "independent"]


def test_columns_of_large_numbers_do_not_run_into_each_other() -> None:
    row = simulated("--devices", "1x3000", "--policy", "independent", "--step-ms", "1").splitlines()[3]
    assert row.split() == ["independent", "93,933,464", "2,935", "×", "97.8%", "0.0%", "2.1%", "0"]


def test_json_is_one_document() -> None:
    document = json.loads(simulated("--devices", "1,0.5", "--policy", "sync", "--link", "1tb/s", "--json"))
    assert (document["schema_version"], document["devices"], document["num_samples"]) == (1, 2, 3200)
    [sync] = document["policies"]
    assert (sync["policy"], sync["averages"]) == ("sync", 50)
    assert sync["efficiency"] == pytest.approx(2 / 3, abs=0.01)
    assert sync["gain"] == pytest.approx(1.0, abs=0.01)


def test_simulating_loads_no_torch() -> None:
    ended = subprocess.run([sys.executable, "-c", NO_TORCH], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_devices_are_speeds_or_specs() -> None:
    assert parse_speeds("1, 0.4x2") == (1.0, 0.4, 0.4)
    assert parse_speeds("cuda:0,cuda:0%30,cpu@0.4x2,xpu:1") == (1.0, 0.3, 0.4, 0.4, 1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,,2", "no speed in ''"),
        ("1x0", "no speed in '1x0'"),
        ("0", "the speed of a device must be above 0, got 0"),
        ("gpu", "unknown device kind 'gpu'"),
        ("auto", "simulate needs speeds or device specs, got auto"),
        ("1,autox2", "simulate needs speeds or device specs, got auto"),
    ],
)
def test_devices_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_speeds(text)
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("text", "bytes_per_s"), [("1gbit", 1.25e8), ("100 Mbit/s", 1.25e7), ("12GB/s", 1.2e10), ("0.5tb", 5e11)]
)
def test_links_are_bits_or_bytes(text: str, bytes_per_s: float) -> None:
    assert parse_link(text) == bytes_per_s


@pytest.mark.parametrize("text", ["fast", "10", "0gbit", "1 gbit per second"])
def test_a_link_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_link(text)
    assert str(caught.value) == f"no speed of a link: {text!r}\nhint: write 1gbit, 100mbit or 12GB/s"


STEP = "step_ms must be finite and > 0, fixed_part in [0, 1), jitter finite and >= 0, got "
NETWORK = "latency_ms must be finite and >= 0, bandwidth_bytes_per_s > 0, got "


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--fixed-part", "1", STEP + "100, 1 and 0"),
        ("--step-ms", "inf", STEP + "inf, 0 and 0"),
        ("--jitter", "nan", STEP + "100, 0 and nan"),
        ("--batch-size", "0", "batch_size and batches must be >= 1, got 0 and 400"),
        ("--batches", "0", "batch_size and batches must be >= 1, got 32 and 0"),
        ("--model-mb", "nan", "the size of a model must be finite and >= 0 MB, got nan"),
        ("--model-mb", "-1", "the size of a model must be finite and >= 0 MB, got -1"),
        ("--latency-ms", "nan", NETWORK + "nan and 1.25e+09"),
        ("--latency-ms", "-1", NETWORK + "-1 and 1.25e+09"),
    ],
)
def test_numbers_that_cannot_be_simulated(option: str, value: str, message: str) -> None:
    shown = CliRunner().invoke(app, ["simulate", option, value])
    assert isinstance(shown.exception, ConfigError)
    assert shown.exception.message == message
    assert shown.exception.hint
