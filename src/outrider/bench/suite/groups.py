"""Groups runs for one table: one model under one condition, by mode, over their seeds.

Decides which runs belong together, which of them show quality and which speed, and the order of modes. Timed runs join
untimed ones of the same condition, so that one table shows the quality of the latter and the speed of the former.
Imports no torch. Called by summaries and reports.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.bench.suite.runs import Case, Subject, SuiteRun
from outrider.policy.policies import TRAINING_POLICIES

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


SOLO = "solo-0"
"""The mode that all others are compared with: the first device alone."""
INDEPENDENT = "independent"


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """One model under one condition."""

    name: str
    """The model, and its condition if the model was run under several."""
    case: Case
    """One of its runs', for what all of them share; where timed runs joined longer untimed ones, an untimed one's."""
    subject: Subject
    by_mode: dict[str, tuple[SuiteRun, ...]]
    """Finished runs by seed; modes in the order they are shown in."""
    incomplete: tuple[SuiteRun, ...]

    @property
    def runs(self) -> tuple[SuiteRun, ...]:
        """All that are finished."""
        return tuple(run for runs in self.by_mode.values() for run in runs)

    def timed(self, mode: str) -> tuple[SuiteRun, ...]:
        """The runs that show speed: those that ran alone on the machine."""
        return tuple(run for run in self.by_mode.get(mode, ()) if run.case.is_timed)

    def judged(self, mode: str) -> tuple[SuiteRun, ...]:
        """The runs that show quality: untimed runs, otherwise timed runs of the same length."""
        whole = [run for run in self.by_mode.get(mode, ()) if run.case.epochs == self.case.epochs]
        return tuple([run for run in whole if not run.case.is_timed] or whole)

    @property
    def has_timed(self) -> bool:
        return any(run.case.is_timed for run in self.runs)

    @property
    def has_untimed(self) -> bool:
        return any(not run.case.is_timed for run in self.runs)

    @property
    def timed_epochs(self) -> int | None:
        """Epochs of the runs that show speed; None without any."""
        return next((run.case.epochs for run in self.runs if run.case.is_timed), None)

    @property
    def solos(self) -> tuple[str, ...]:
        return tuple(f"solo-{rank}" for rank in range(len(self.case.devices)))

    @property
    def num_seeds(self) -> int:
        """Maximum number of seeds per mode among the runs that show quality."""
        return max((len(self.judged(mode)) for mode in self.by_mode), default=0)

    @property
    def num_rounds(self) -> int:
        """Maximum number of seeds per mode among the runs that show speed."""
        return max((len(self.timed(mode)) for mode in self.by_mode), default=0)


def group_runs(runs: Iterable[SuiteRun]) -> list[Group]:
    """All models in the order of their names, each condition on its own; timed runs join untimed ones of theirs."""
    by_condition: dict[tuple[Any, ...], list[SuiteRun]] = defaultdict(list)
    for run in _without_repeats(runs):
        by_condition[*run.case.condition, TIMED if run.case.is_timed else UNTIMED].append(run)
    joined = join_timed(by_condition)
    conditions = sorted(joined, key=str)
    return [_group(joined[one], _name(one, conditions)) for one in conditions]


def mode_order(mode: str) -> tuple[int, str]:
    """Solos, the ceiling, our policies from the simplest to the boldest, then the peers."""
    policy = mode.rpartition("-")[2]
    if mode.startswith("solo-"):
        return 0, mode
    if mode == INDEPENDENT:
        return 1, mode
    if policy in TRAINING_POLICIES and mode.rpartition("-")[0] in ("", "cpu", "nccl", "graph"):
        return 2 + TRAINING_POLICIES.index(policy), mode
    return 2 + len(TRAINING_POLICIES), mode


def _without_repeats(runs: Iterable[SuiteRun]) -> list[SuiteRun]:
    """A run that was reproduced counts once; the one at its own place comes first."""
    ordered = sorted(runs, key=lambda run: (run.folder.name != run.case.folder.name, str(run.folder)))
    by_key: dict[str, SuiteRun] = {}
    for run in ordered:
        by_key.setdefault(run.case.key, run)
    return list(by_key.values())


def _group(runs: Sequence[SuiteRun], name: str) -> Group:
    finished = sorted(
        (run for run in runs if run.is_finished),
        key=lambda run: (mode_order(run.case.mode), run.case.seed, run.case.is_timed),
    )
    by_mode: dict[str, list[SuiteRun]] = defaultdict(list)
    for run in finished:
        by_mode[run.case.mode].append(run)
    return Group(
        name=name,
        case=runs[0].case,
        subject=runs[0].subject,
        by_mode={mode: tuple(some) for mode, some in by_mode.items()},
        incomplete=tuple(run for run in runs if not run.is_finished),
    )


def _name(condition: tuple[Any, ...], conditions: Sequence[tuple[Any, ...]]) -> str:
    """The name of the model, with every value in which its conditions differ."""
    model = condition[0]
    rivals = [other for other in conditions if other[0] == model]
    if len(rivals) == 1:
        return str(model)
    labels = ("{} epochs", "batch {}", "on {}", "{}", "with {}", "{}")
    differing = [
        label.format(_shown(value))
        for place, (label, value) in enumerate(zip(labels, condition[1:], strict=True), start=1)
        if len({str(other[place]) for other in rivals}) > 1
    ]
    return f"{model} ({', '.join(differing)})"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)
