"""Several ways of training run at once and take turns, an epoch each, in a circle while the others wait.

So what else the machine does hits all ways alike, within seconds; rounds of whole runs, one after the other, differ by
more than most things that one wants to measure. A turn is handed over through a named pipe per way and rank, before the
first forward pass of an epoch. Rank 0 writes the seconds of each turn, with the end of the epoch in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

RANKS = 2
WARM_UP = 3
"""Rounds that are not counted: the last ways still start in the first one."""
_TURN_S = 600.0


class Turns:
    """One rank's part; reads from the environment who it is."""

    def __init__(self) -> None:
        told = json.loads(os.environ["TURNS"])
        self._folder = Path(told["folder"])
        self._way, self._following = told["way"], told["following"]
        self._steps, self._epochs = told["steps"], told["epochs"]
        self._rank = os.environ.get("RANK", "0")
        self._done = 0
        self._began_s = 0.0

    def step(self) -> None:
        """Before every forward pass."""
        if self._done % self._steps == 0:
            if self._done:
                self._write(time.perf_counter() - self._began_s)
                self._hand_over()
            self._await()
            self._began_s = time.perf_counter()
        self._done += 1
        if self._done == self._steps * self._epochs:  # the last epoch is not counted
            self._hand_over()

    def _write(self, seconds: float) -> None:
        if self._rank == "0":
            with (self._folder / f"{self._way}.times").open("a") as file:
                print(seconds, file=file)

    def _hand_over(self) -> None:
        with _opened(self._folder / f"{self._following}-{self._rank}") as pipe:
            os.write(pipe, b".")

    def _await(self) -> None:
        with _opened(self._folder / f"{self._way}-{self._rank}") as pipe:
            if not select.select([pipe], [], [], _TURN_S)[0]:
                raise SystemExit(f"{self._way}, rank {self._rank}: no turn came in {_TURN_S:.0f} s")
            os.read(pipe, 1)


_mine: list[Turns] = []


def step() -> None:
    """Before every forward pass of this process."""
    if not _mine:
        _mine.append(Turns())
    _mine[0].step()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    pipe = os.open(path, os.O_RDWR)
    try:
        yield pipe
    finally:
        os.close(pipe)


def take_turns(
    ways: Sequence[str],
    command: Callable[[str, Path], Sequence[str]],
    *,
    rounds: int,
    steps: int,
    ranks: int = RANKS,
) -> list[dict[str, float]]:
    """Milliseconds of each way in each round; `command` starts a way, whose epochs have so many steps per rank."""
    epochs = rounds + WARM_UP + 1
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"outrider-{os.getpid()}-")))
        for way in ways:
            for rank in range(ranks):
                os.mkfifo(folder / f"{way}-{rank}")
                # A named pipe forgets what nobody holds open.
                pipe = stack.enter_context(_opened(folder / f"{way}-{rank}"))
                if way == ways[0]:
                    os.write(pipe, b".")
        jobs = {}
        for way, following in zip(ways, [*ways[1:], ways[0]], strict=True):
            told = {"folder": str(folder), "way": way, "following": following, "steps": steps, "epochs": epochs}
            jobs[way] = subprocess.Popen(
                command(way, folder),
                env={**os.environ, "OMP_NUM_THREADS": "1", "EPOCHS": str(epochs), "TURNS": json.dumps(told)},
                stdout=(folder / f"{way}.log").open("w"),
                stderr=subprocess.STDOUT,
            )
            stack.callback(jobs[way].kill)
        for way, job in jobs.items():
            if job.wait():
                raise SystemExit(f"{way}: {(folder / f'{way}.log').read_text()[-3000:]}")
        times = {way: [float(line) for line in (folder / f"{way}.times").read_text().split()] for way in ways}
    return [{way: round(1e3 * times[way][number], 2) for way in ways} for number in range(WARM_UP, WARM_UP + rounds)]


def ratio_in_words(rounds: Sequence[dict[str, float]], way: str, base: str) -> str:
    """The median over rounds of the time of one way by that of another, with the 95 % interval of a bootstrap."""
    ratios = [times[way] / times[base] for times in rounds]
    numbers = random.Random(0)
    drawn = sorted(median(numbers.choices(ratios, k=len(ratios))) for _ in range(5_000))
    return f"{median(ratios):.3f} | {drawn[124]:.3f} to {drawn[4874]:.3f} | {len(ratios)}"
