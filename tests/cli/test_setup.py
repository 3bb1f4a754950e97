"""`outrider setup`: the plan on stdout, questions only to people, refusals with exit code 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from outrider.cli.setup import EPILOG, setup
from outrider.machine import codec
from outrider.machine.machine_facts import Disk
from outrider.machine.variants import RECORD, Variant, VariantStore, active_variant

FACTS = Path(__file__).parent.parent / "machine" / "facts"
app = typer.Typer()
app.command(epilog=EPILOG)(setup)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))


def plan(machine: str, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["--facts", str(FACTS / f"{machine}.json"), *arguments])


def test_a_dry_run_prints_the_plan_and_touches_nothing(tmp_path: Path) -> None:
    result = plan("rtx5060ti-gtx1060-wsl2", "--dry-run")
    assert result.exit_code == 0
    assert result.stdout.startswith("plan: the conda-forge build, the only prebuilt one for all cards\n")
    assert list(tmp_path.iterdir()) == []


def test_the_driver_case_is_refused_with_ways_out() -> None:
    result = plan("rtx5060ti-gtx1060-bare", "--yes")
    assert result.exit_code == 1
    assert "way out: a virtual machine with one card passed through" in result.stdout


def test_a_card_left_out_opens_the_way() -> None:
    result = plan("rtx5060ti-gtx1060-bare", "--dry-run", "--cards", "0")
    assert result.exit_code == 0
    assert "2.13-cu130 for NVIDIA GeForce RTX 5060 Ti\n" in result.stdout


def test_a_way_and_a_version_may_be_named() -> None:
    result = plan("rtx5060ti-gtx1060-wsl2", "--dry-run", "--way", "groups", "--version", "2.12")
    assert "1. 2.12-cu130 for NVIDIA GeForce RTX 5060 Ti\n" in result.stdout
    assert "2. 2.12-cu126 for NVIDIA GeForce GTX 1060 6GB\n" in result.stdout


def test_a_version_is_kept_to_the_patch_level() -> None:
    result = plan("h200", "--dry-run", "--version", "2.13.0", "--way", "cpu")
    assert "1. 2.13.0-cpu\n" in result.stdout
    assert result.stdout.count("torch==2.13.0\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--way", "whell"),
            "unknown way 'whell'\nhint: did you mean wheel? ways are cpu, wheel, conda, groups, build",
        ),
        (("--cards", "first"), "--cards takes numbers like 0,1, got 'first'\nhint: see `outrider diagnose`"),
        (("--cards", "7"), "card 7 is not there\nhint: found 0 (NVIDIA H200)"),
    ],
)
def test_mistyped_options_get_a_clear_answer(arguments: tuple[str, ...], message: str) -> None:
    assert str(plan("h200", "--dry-run", *arguments).exception) == message


def test_another_machines_facts_install_nothing(tmp_path: Path) -> None:
    result = plan("h200", "--yes")
    assert "may be another machine, so nothing is installed\nhint: add --dry-run" in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_without_a_terminal_and_without_yes_nothing_is_installed(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--way", "cpu"])
    assert str(result.exception) == "no terminal to ask on: install 2.13-cpu?\nhint: pass --yes"
    assert list(tmp_path.iterdir()) == []


def test_what_is_installed_already_is_activated_without_a_question(tmp_path: Path) -> None:
    store = VariantStore(tmp_path / "home" / "torch")
    store.path("2.13-cpu").mkdir(parents=True)
    codec.write(Variant(name="2.13-cpu", backend="cpu", torch="2.13.0+cpu"), store.path("2.13-cpu") / RECORD)
    result = CliRunner().invoke(app, ["--way", "cpu"])
    assert result.exit_code == 0
    assert result.stdout.endswith("\n1. 2.13-cpu\n   installed already\n")
    assert active_variant(tmp_path) == "2.13-cpu"


def test_the_disk_that_counts_is_that_of_the_variants(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def read_disk(folder: Path) -> Disk:
        asked.append(folder)
        return Disk(free_bytes=2**20)

    monkeypatch.setattr("outrider.machine.detect.read_disk", read_disk)
    (tmp_path / "home").mkdir()
    result = CliRunner().invoke(app, ["--way", "cpu", "--yes"])
    assert str(result.exception).startswith("the plan takes about 1.0 GiB of disk, 0.0 GiB are free\n")
    assert asked == [tmp_path / "home"]
