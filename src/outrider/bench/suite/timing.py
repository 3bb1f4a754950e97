"""Which timed runs stand beside which untimed ones, so that one table has the quality of these and the speed of those.

Decides on whole conditions, never on single runs, and leaves every run in one place. Knows no torch.
Called when runs are grouped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outrider.bench.suite.runs import SuiteRun

TIMED, UNTIMED, BOTH = "timed", "not timed", "timed apart"
"""The last part of a condition, as a group's name says it."""
Condition = tuple[Any, ...]
"""Title, epochs, batch, devices, data, settings, and one of the above."""


def join_timed(by_condition: Mapping[Condition, Sequence[SuiteRun]]) -> dict[Condition, list[SuiteRun]]:
    """Per model, devices, batch, data and settings: the longest untimed runs take in timed ones that are not longer.

    What is not finished decides nothing. All other conditions stay as they are.
    """
    joined = {condition: list(runs) for condition, runs in by_condition.items()}
    for alike in _alike(by_condition):
        untimed = max((one for one in alike if _tells(by_condition[one], UNTIMED, one)), key=_epochs, default=None)
        if untimed is None:
            continue
        candidates = [
            one for one in alike if _tells(by_condition[one], TIMED, one) and _epochs(one) <= _epochs(untimed)
        ]
        if candidates:
            # The length at which most modes were timed; of two such, the longer.
            timed = max(candidates, key=lambda one: (_num_modes(by_condition[one]), _epochs(one)))
            joined[*untimed[:-1], BOTH] = [*joined.pop(untimed), *joined.pop(timed)]
    return joined


def _alike(conditions: Iterable[Condition]) -> list[list[Condition]]:
    """Those that differ in nothing but epochs and timing."""
    found: dict[Condition, list[Condition]] = defaultdict(list)
    for condition in conditions:
        found[condition[0], *condition[2:-1]].append(condition)
    return list(found.values())


def _tells(runs: Iterable[SuiteRun], timing: str, condition: Condition) -> bool:
    return condition[-1] == timing and any(run.is_finished for run in runs)


def _epochs(condition: Condition) -> int:
    return int(condition[1])


def _num_modes(runs: Iterable[SuiteRun]) -> int:
    return len({run.case.mode for run in runs if run.is_finished})
