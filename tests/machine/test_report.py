"""Diagnoses as text: narrow enough for a terminal, and clean enough for a public issue."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.machine.diagnosis import Diagnosis, Identity, clean, diagnose, make_report, render
from outrider.machine.machine_facts import TorchBuild, load_facts
from outrider.machine.wheels import load_table
from outrider.virtual.gain_forecast import forecast

FACTS = Path(__file__).parent / "facts"
MACHINES = sorted(path.stem for path in FACTS.glob("*.json"))
ADA = Identity(user="ada", host="lovelace", home="/home/ada")


def judged(machine: str) -> Diagnosis:
    facts = load_facts(FACTS / f"{machine}.json")
    return diagnose(facts, load_table(), forecast=forecast(facts))


def text(machine: str) -> str:
    return render(judged(machine), paint=str)


@pytest.mark.parametrize("machine", MACHINES)
def test_no_line_is_wider_than_a_terminal(machine: str) -> None:
    assert max(map(len, text(machine).splitlines())) <= 80


@pytest.mark.parametrize("machine", MACHINES)
def test_every_verdict_is_shown(machine: str) -> None:
    shown = " ".join(text(machine).split())
    assert all(verdict.what in shown for verdict in judged(machine).verdicts)


def test_the_last_line_counts_the_findings() -> None:
    assert text("rtx5060ti-gtx1060-bare").splitlines()[-1] == "1 failure, 0 warnings"


def test_a_card_is_shown_with_the_place_it_was_read_from() -> None:
    assert "  cuda:0    NVIDIA H200, sm_90, 140.4 GiB (NVML)\n" in text("h200")


def test_the_gain_is_shown_policy_by_policy() -> None:
    shown = text("rtx3090-rtx3060")
    assert "  sync       0.72 ×  waiting 31%, averaging 2% of the time\n" in shown
    assert "  async      1.37 ×  waiting 0%, averaging 0% of the time\n" in shown


def test_colour_goes_to_the_level_words_only() -> None:
    painted = render(judged("old-driver"), paint=lambda word: f"<{word}>")
    assert "  <failure   >driver 470.256.02 is too old\n" in painted


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("/home/ada/env/bin/python", "~/env/bin/python"),
        ("/home/grace/env", "/home/<user>/env"),
        ("/Users/grace/env", "/Users/<user>/env"),
        ("seen by ada on lovelace", "seen by <user> on <host>"),
        ("radar and Canada stay", "radar and Canada stay"),
        ("GPU-2a3b4c5d-1111-2222-3333-0123456789ab", "<uuid>"),
        ("link 00:1a:2b:3c:4d:5e", "link <mac>"),
        ("connect to 192.168.1.17 failed", "connect to <address> failed"),
        ("Serial Number: 1320218033321", "Serial Number: <serial>"),
        ("driver 580.95.05, cuDNN 9.10.2", "driver 580.95.05, cuDNN 9.10.2"),
        ("0000:01:00.0", "0000:01:00.0"),
    ],
)
def test_names_addresses_and_serials_are_taken_out(before: str, after: str) -> None:
    assert clean(before, ADA) == after


def test_a_short_user_name_does_not_eat_the_text() -> None:
    assert clean("a test", Identity(user="a", host="b", home="/root")) == "a test"


def test_a_report_is_one_block_without_names() -> None:
    diagnosis = judged("no-gpu")
    broken = TorchBuild(
        interpreter="/home/ada/env/bin/python", origin="PATH", error="OSError: /home/ada/libtorch.so on lovelace"
    )
    facts = replace(diagnosis.facts, torches=(*diagnosis.facts.torches, broken))
    report = make_report(diagnose(facts, load_table(), forecast=forecast(facts)), ADA)
    assert report.count("```") == 2
    assert "OSError: ~/libtorch.so on <host>" in report
    assert not any(name in report for name in ("ada", "lovelace"))
