"""The cells of the study of learning per sample, and the order in which they run. Called by learning_study.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run; `window` is the number of steps of the fastest rank between two averages, 0 for one device alone."""

    task: str
    speeds: str = "solo"
    window: int = 0
    remedy: str = "plain"
    rate: float = 1.0
    """Relative to the task's."""
    length: float = 1.0
    """Of the run and its schedule, relative to the task's."""
    seed: int = 0

    @property
    def key(self) -> str:
        fields = (self.task, self.speeds, self.window, self.remedy, self.rate, self.length, self.seed)
        return "|".join(str(field) for field in fields)


FLAT = ("mlp-adam", "mlp-sgd", "mlp-rmsprop", "mlp-adam-b8")
"""Tasks with a constant rate: one long run alone tells the loss after every number of samples."""
SCHEDULED = ("mlp-adamw",)
"""Tasks with a schedule: a run alone for each length."""
RATES = (0.5, 1.0, 2.0)
WINDOWS = (2, 5, 20, 60)
LENGTHS = (0.5, 0.65, 0.8, 1.0, 1.2)
CHOICE, REPORT = (0, 1, 2), (3, 4, 5)
"""Seeds with which settings are chosen and constants fitted, and those with which they are judged."""
REMEDIES = ("scale", "root", "outer", "outer0.2", "bold", "delayed", "state", "state+root", "state+outer0.2", "weigh")
SCHEDULES = ("warmup", "early", "late", "state+late")
"""Of exact steps first, and of windows."""


def jobs(only: str) -> Iterator[list[Cell]]:
    """Lists of cells that can run as one stack: the same task, speeds and length."""
    for name, job in _named_jobs():
        if name.startswith(only):
            yield job


def _named_jobs() -> Iterator[tuple[str, list[Cell]]]:
    seeds = CHOICE + REPORT
    yield from _alone(seeds)
    yield from _windows("pair0.4", (1.0,), WINDOWS, seeds)
    yield from _text()
    yield from _higher_rates(seeds)
    yield from _remedies(5, REMEDIES + SCHEDULES, seeds)
    yield from _outer_steps(seeds)
    yield from _windows("pair0.4", (0.5, 2.0), (5, 20), seeds)
    for speeds in ("pair0.8", "quad"):
        yield from _windows(speeds, (1.0,), (2, 5, 20), seeds)
    yield from _lags(seeds)
    yield from _in_lab(CHOICE)
    yield from _windows("trio", (1.0,), (2, 5, 20), seeds)
    yield from _remedies(20, REMEDIES[:7], seeds)
    yield from _phases(seeds)
    yield from _suite(CHOICE)
    yield from _behind(seeds)


def _alone(seeds: tuple[int, ...]) -> Iterator[tuple[str, list[Cell]]]:
    for task in FLAT:
        yield "alone", [Cell(task=task, rate=rate, length=1.3, seed=seed) for rate, seed in product(RATES, seeds)]
    for task, length in product(SCHEDULED, LENGTHS):
        yield "alone", [Cell(task=task, rate=rate, length=length, seed=seed) for rate, seed in product(RATES, seeds)]


def _windows(
    speeds: str, rates: tuple[float, ...], windows: tuple[int, ...], seeds: tuple[int, ...]
) -> Iterator[tuple[str, list[Cell]]]:
    for task in FLAT + SCHEDULED:
        cells = product(windows, rates, seeds)
        yield "windows", [Cell(task=task, speeds=speeds, window=w, rate=rate, seed=s) for w, rate, s in cells]


def _higher_rates(seeds: tuple[int, ...]) -> Iterator[tuple[str, list[Cell]]]:
    """The schedule of mlp-adamw bears higher rates than a constant rate does."""
    for length in LENGTHS:
        cells = product((4.0, 8.0), seeds)
        yield "alone", [Cell(task="mlp-adamw", rate=rate, length=length, seed=seed) for rate, seed in cells]
    cells = product((2, 5, 20, 60), (2.0, 4.0), seeds)
    yield "windows", [Cell(task="mlp-adamw", speeds="pair0.4", window=w, rate=rate, seed=s) for w, rate, s in cells]


def _remedies(window: int, remedies: tuple[str, ...], seeds: tuple[int, ...]) -> Iterator[tuple[str, list[Cell]]]:
    for task in ("mlp-adam", "mlp-sgd", "mlp-rmsprop", "mlp-adamw"):
        rate = 4.0 if task == "mlp-adamw" else 1.0
        cells = product(remedies, seeds)
        yield (
            "remedies",
            [Cell(task=task, speeds="pair0.4", window=window, remedy=r, rate=rate, seed=s) for r, s in cells],
        )


def _outer_steps(seeds: tuple[int, ...]) -> Iterator[tuple[str, list[Cell]]]:
    """The outer step by length of window: at a constant rate, with a rate that falls, and for a language model."""
    cells = product(WINDOWS, ("plain", "outer", "bold"), (0.5, 1.0), seeds)
    yield "outer", [Cell(task="mlp-sgd", speeds="pair0.4", window=w, remedy=r, rate=f, seed=s) for w, r, f, s in cells]
    for length in LENGTHS:
        yield "outer", [Cell(task="mlp-sgd-steps", length=length, seed=seed) for seed in seeds]
    cells = product(WINDOWS, ("plain", "outer", "bold", "outer0.2", "state", "root"), seeds)
    yield "outer", [Cell(task="mlp-sgd-steps", speeds="pair0.4", window=w, remedy=r, seed=s) for w, r, s in cells]
    cells = product((5, 20), ("outer", "delayed", "state+root"), CHOICE)
    yield "outer", [Cell(task="gpt-adamw", speeds="pair0.4", window=w, remedy=r, rate=0.5, seed=s) for w, r, s in cells]


def _lags(seeds: tuple[int, ...]) -> Iterator[tuple[str, list[Cell]]]:
    """Exact steps whose sums are applied one step late."""
    for task in FLAT + SCHEDULED:
        yield "lags", [Cell(task=task, remedy="lag1", rate=rate, seed=seed) for rate, seed in product(RATES, seeds)]
    yield "lags", [Cell(task="mlp-sgd-steps", remedy="lag1", seed=seed) for seed in seeds]
    yield "lags", [Cell(task="mlp-adamw", remedy="lag1", rate=4.0, seed=seed) for seed in seeds]
    yield "lags", [Cell(task="gpt-adamw", remedy="lag1", rate=rate, seed=s) for rate, s in product((0.5, 1.0), CHOICE)]


def _in_lab(seeds: tuple[int, ...]) -> Iterator[tuple[str, list[Cell]]]:
    """Models of the suite with BatchNorm and LSTM, which cannot be stacked."""
    for task in ("lab-lenet-adam", "lab-rnn-rmsprop"):
        yield "lab", [Cell(task=task, length=1.3, seed=seed) for seed in seeds]
        for window in (5, 20):
            yield "lab", [Cell(task=task, speeds="pair0.4", window=window, seed=seed) for seed in seeds]


SUITE_RATES = {"lab-resnet8-sgd": 0.25, "lab-gpt-nano": 2.0, "lab-char-rnn": 1.0, "lab-resnet20-sgd": 0.25}
"""The best of a few powers of two, for one device alone in runs as short as these, one seed."""


def _suite(seeds: tuple[int, ...]) -> Iterator[tuple[str, list[Cell]]]:
    """Models of the suite in full size, in short runs."""
    for task, rate in SUITE_RATES.items():
        lengths = (1.3,) if task == "lab-char-rnn" else LENGTHS
        yield "suite", [Cell(task=task, rate=rate, length=n, seed=s) for n, s in product(lengths, seeds)]
        for window, remedy in (*product((5, 20), ("plain", "outer")), *product((5,), ("outer0.2", "root", "state"))):
            cells = [Cell(task=task, speeds="pair0.4", window=window, remedy=remedy, rate=rate, seed=s) for s in seeds]
            yield "suite", cells


def _phases(seeds: tuple[int, ...]) -> Iterator[tuple[str, list[Cell]]]:
    """Windows that get shorter towards the end of each phase of the learning rate."""
    cells = product((8, 20), ("fine", "fine+phases", "fine+outer", "fine+outer+phases"), seeds)
    yield (
        "phases",
        [Cell(task="mlp-sgd-steps", speeds="pair0.4", window=w, remedy=r, seed=s) for w, r, s in cells],
    )


def _behind(seeds: tuple[int, ...]) -> Iterator[tuple[str, list[Cell]]]:
    """Averages that arrive half a window late, as in `async`; each cell has one without the delay beside it."""
    for speeds in ("pair0.4", "pair0.8"):
        for task in FLAT + SCHEDULED:
            rate = 4.0 if task == "mlp-adamw" and speeds == "pair0.4" else 1.0
            cells = product((2, 5, 20), seeds)
            yield (
                "behind",
                [Cell(task=task, speeds=speeds, window=w, remedy="behind", rate=rate, seed=s) for w, s in cells],
            )
    cells = product((2, 5, 20), seeds)
    yield (
        "behind",
        [Cell(task="mlp-sgd-steps", speeds="pair0.4", window=w, remedy="behind", seed=s) for w, s in cells],
    )
    cells = product((2, 5, 20), (0.5, 1.0), CHOICE)
    yield (
        "behind",
        [Cell(task="gpt-adamw", speeds="pair0.4", window=w, remedy="behind", rate=f, seed=s) for w, f, s in cells],
    )


def _text() -> Iterator[tuple[str, list[Cell]]]:
    """A language model costs ten times as much per step: fewer cells."""
    for length in LENGTHS[:4]:
        yield (
            "text",
            [Cell(task="gpt-adamw", rate=rate, length=length, seed=s) for rate, s in product((0.5, 1.0), CHOICE)],
        )
    for rate in (0.5, 1.0):
        yield (
            "text",
            [
                Cell(task="gpt-adamw", speeds="pair0.4", window=window, rate=rate, seed=seed)
                for window, seed in product(WINDOWS, CHOICE)
            ],
        )
    yield (
        "text",
        [
            Cell(task="gpt-adamw", speeds="pair0.4", window=window, remedy=remedy, rate=0.5, seed=seed)
            for window, remedy, seed in product((5, 20), ("state", "root", "outer0.2"), CHOICE)
        ],
    )
