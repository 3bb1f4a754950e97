"""Pulses: exact sums however they are joined, a bounded number, and lines that survive damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.timeline import pulses
from outrider.timeline.activity import PHASES
from outrider.timeline.bounded_file import BoundedFile, read_header
from outrider.timeline.pulses import Pulse, as_line, joined, joined_lines, parse, thinned, total_spent_s

spent = st.dictionaries(st.sampled_from(PHASES), st.integers(0, 500).map(lambda ms: ms / 1000), max_size=4)


@st.composite
def pulse_lists(draw: st.DrawFn) -> list[Pulse]:
    parts = draw(st.lists(st.tuples(spent, st.integers(0, 50), st.integers(0, 9)), min_size=1, max_size=30))
    end_s, made = 0.0, []
    for spent_s, samples, batches in parts:
        seconds = sum(spent_s.values())
        end_s += seconds
        made.append(
            Pulse(end_s=end_s, seconds=seconds, phase="compute", spent_s=spent_s, samples=samples, batches=batches)
        )
    return made


@given(pulse_lists(), st.integers(0, 10))
def test_thinning_keeps_the_sums_and_the_newest(known: list[Pulse], newest: int) -> None:
    fewer = thinned(known, newest=newest, join=joined)
    assert sum(pulse.samples for pulse in fewer) == sum(pulse.samples for pulse in known)
    assert sum(pulse.batches for pulse in fewer) == sum(pulse.batches for pulse in known)
    assert total_spent_s(fewer) == pytest.approx(total_spent_s(known))
    kept = min(newest, len(known))
    assert fewer[len(fewer) - kept :] == known[len(known) - kept :]
    assert len(fewer) <= (len(known) - kept + 1) // 2 + kept
    assert fewer[-1].end_s == known[-1].end_s


@given(pulse_lists())
def test_a_line_comes_back_as_the_pulse_it_was(known: list[Pulse]) -> None:
    for pulse in known:
        back = parse(json.loads(json.dumps(as_line(pulse))))
        assert back is not None
        assert (back.samples, back.batches, back.phase) == (pulse.samples, pulse.batches, pulse.phase)
        assert total_spent_s([back]) == pytest.approx(total_spent_s([pulse]), abs=1e-3)


@pytest.mark.parametrize(
    "line",
    [
        {},
        {"t": 1},
        {"t": "x", "s": 1, "phase": "compute", "spent_s": {}},
        {"t": 1, "s": 1, "phase": "compute", "spent_s": 3},
        {"t": 1, "s": 1, "phase": "compute", "spent_s": {"compute": float("inf")}},
        {"t": float("nan"), "s": 1, "phase": "compute", "spent_s": {}},
        {"t": 1, "s": 1, "phase": "compute", "spent_s": {}, "samples": [1]},
    ],
)
def test_a_damaged_line_is_no_pulse(line: dict[str, Any]) -> None:
    assert parse(line) is None


def test_a_file_stays_bounded_and_its_sums_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.timeline.bounded_file.MAX_LINES", 40)
    monkeypatch.setattr("outrider.timeline.bounded_file.NEWEST_LINES", 10)
    file = BoundedFile(tmp_path / "live" / "rank0.jsonl", join=joined_lines)
    file.open({"schema_version": pulses.SCHEMA_VERSION, "rank": 0})
    for i in range(500):
        file.add(as_line(Pulse(end_s=i + 1.0, seconds=1.0, phase="compute", spent_s={"compute": 1.0}, samples=3)))
    file.close()
    header, *lines = map(json.loads, file.path.read_text().splitlines())
    assert header == read_header(file.path) == {"schema_version": 1, "rank": 0}
    assert len(lines) <= 40
    assert sum(line["samples"] for line in lines) == 1500
    assert [line["s"] for line in lines[-10:]] == [1.0] * 10


def test_a_file_that_cannot_be_written_ends_with_a_word(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "live").write_text("a file is in the way")
    file = BoundedFile(tmp_path / "live" / "rank0.jsonl", join=joined_lines)
    file.open({"rank": 0})
    file.add({"t": 1})
    file.close()
    assert capfd.readouterr().err.count("the live page stands still") == 1


@pytest.mark.parametrize("content", [b"", b"[1]\n", b"{half", b"\xff\xfe\n"])
def test_a_file_without_a_header_has_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    assert read_header(tmp_path / "file") is None
    assert read_header(tmp_path / "missing") is None
