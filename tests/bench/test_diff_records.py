"""The diff on records of real runs: one build, and the same build slowed on purpose (iterations 1.8 times as long).

Each record is five rounds of fresh processes, made on two quiet cores by `records/make.sh`.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from outrider.bench.diff.compare import compare
from outrider.bench.iteration.iteration_record import IterationFile, read_iterations

RECORDS = Path(__file__).parent / "records"
SAME = [read_iterations(path) for path in sorted(RECORDS.glob("same-*.json"))]
SLOWED = [read_iterations(path) for path in sorted(RECORDS.glob("slowed-*.json"))]


def test_two_runs_of_one_build_are_not_called_different_in_at_least_19_of_20_tries() -> None:
    tries = [compare(baseline, test) for baseline, test in combinations(SAME, 2)]
    called_different = [one for one in tries if any(row.is_different for row in one.rows)]
    assert len(tries) >= 20
    assert len(called_different) <= len(tries) / 20


@pytest.mark.parametrize("slowed", SLOWED, ids=lambda file: Path(file.name).stem)
def test_a_slowed_build_is_called_slower_in_every_row(slowed: IterationFile) -> None:
    comparison = compare(SAME[0], slowed)
    assert [row.verdict for row in comparison.rows] == ["slower"] * 3
    assert len(comparison.slower_than(3)) == 3


@pytest.mark.parametrize("slowed", SLOWED, ids=lambda file: Path(file.name).stem)
def test_going_back_to_the_quick_build_is_called_faster(slowed: IterationFile) -> None:
    assert [row.verdict for row in compare(slowed, SAME[0]).rows] == ["faster"] * 3
