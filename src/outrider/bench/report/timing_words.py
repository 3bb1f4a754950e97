"""What a table says of runs that were not timed, in plain words.

Decides the words only; which runs tell of what is the group's to say. Knows no torch. Called by the report and by the
text that ends a sweep.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.bench.suite.groups import Group

_UNTIMED = "trained beside each other and were not timed"


def epochs_words(group: Group) -> str:
    """200 epochs, or 200 epochs for quality and 11 for speed."""
    if not (group.has_timed and group.has_untimed) or group.timed_epochs == group.case.epochs:
        return f"{group.case.epochs} epochs"
    return f"{group.case.epochs} epochs for quality and {group.timed_epochs} for speed"


def seeds_words(group: Group) -> str:
    """3 seeds, or 3 seeds for quality and 1 for speed."""
    seeds = f"{group.num_seeds} seed{'' if group.num_seeds == 1 else 's'}"
    if not (group.has_timed and group.has_untimed) or group.num_rounds == group.num_seeds:
        return seeds
    return f"{seeds} for quality and {group.num_rounds} for speed"


def timing_note(group: Group) -> str:
    """Under the table of results; empty where every run was timed."""
    if not group.has_untimed:
        return ""
    if not group.has_timed:
        return f"These runs {_UNTIMED}: a dash stands for all that is a matter of speed."
    sentences = [
        f"Quality is of runs that {_UNTIMED}, {group.case.epochs} epochs each; speed, waiting and averages are of runs "
        f"that had the machine to themselves, {group.timed_epochs} epochs each.",
        "Time to target is worked out from both: the epochs that the untimed run took to get there, times the median "
        "seconds of an epoch of the timed runs, warm-up excluded.",
        *_exceptions(group),
    ]
    return " ".join(sentences)


def _exceptions(group: Group) -> list[str]:
    """Modes that have one half only."""
    untimed = [mode for mode in group.by_mode if not group.timed(mode)]
    unjudged = [mode for mode in group.by_mode if not group.judged(mode) and _is_evaluated(group, mode)]
    whole = [mode for mode in group.by_mode if any(run.case.is_timed for run in group.judged(mode))]
    return [
        *([f"Not timed, so with a dash for speed: {_listed(untimed)}."] if untimed else []),
        *([f"Timed only, and not long enough to be judged: {_listed(unjudged)}."] if unjudged else []),
        *([f"Quality and speed of the same, timed runs: {_listed(whole)}."] if whole else []),
    ]


def _is_evaluated(group: Group, mode: str) -> bool:
    return any(run.epochs[-1].eval is not None for run in group.by_mode[mode])


def _listed(modes: Sequence[str]) -> str:
    return ", ".join(modes)


def timing_hint(group: Group) -> str:
    """The same at a glance, for 80 columns."""
    if not group.has_timed:
        return f"these runs {_UNTIMED}"
    return "quality is of untimed runs, speed of timed ones; time to target is worked out"
