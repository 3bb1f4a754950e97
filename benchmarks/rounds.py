"""Rounds of measurements that take turns: every round runs all of them, in an order that turns.

What a script of rounds has in common: its options, one JSON line per run, and that a run that fails is a line too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from outrider.errors import OutriderError

One = TypeVar("One")


def make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("path", type=Path, help="the file of records")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the number of the first round")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after this time")
    return parser


def take_rounds(
    wishes: argparse.Namespace,
    ones: Sequence[One],
    *,
    describe: Callable[[One], dict[str, Any]],
    measure: Callable[[One], dict[str, Any]],
    shift: int,
) -> None:
    """Measure each in every round; the next round begins `shift` places later."""
    deadline_s = time.monotonic() + wishes.seconds
    for number in range(wishes.first, wishes.first + wishes.rounds):
        start = shift * number % len(ones)
        for one in (*ones[start:], *ones[:start]):
            if time.monotonic() > deadline_s:
                return
            line = {"round": number, **describe(one)}
            try:
                line |= measure(one)
            except OutriderError as error:
                line["error"] = str(error)[:500]
            with wishes.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(line, flush=True)
