"""A picture of learning against time: the mean evaluation over the seeds, one line per mode.

    python benchmarks/curves.py RUNS FILE.svg [--modes solo-0,nccl-async] [--from 0.8]

RUNS has long runs for quality and timed ones for the seconds of an epoch, as the report reads them.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from outrider.bench.statistics import mean
from outrider.bench.suite.groups import Group, group_runs
from outrider.bench.suite.runs import read_runs
from outrider.bench.suite.suite_summary import seconds_per_epoch
from outrider.timeline.web_page import INK, LINE, QUIET, RANK_COLOURS

WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 56, 130, 16, 44
FONT = "font-family='system-ui,sans-serif' font-size='13'"


@dataclass(frozen=True)
class Curve:
    mode: str
    points: list[tuple[float, float]]
    """Seconds of training, evaluation."""


@dataclass(frozen=True)
class Frame:
    """What is shown, and where it lies in the picture."""

    end_s: float
    low: float
    high: float

    def x(self, seconds: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * seconds / self.end_s

    def y(self, value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.high - value) / (self.high - self.low)


def curve(group: Group, mode: str) -> Curve:
    runs, epoch_s = group.judged(mode), seconds_per_epoch(group.timed(mode))
    assert runs, f"{mode} has no long runs"
    assert epoch_s is not None, f"{mode} has no timed runs"
    evals = [mean([epoch.eval or 0.0 for epoch in row]) for row in zip(*(run.epochs for run in runs), strict=True)]
    return Curve(mode, [(number * epoch_s, value) for number, value in enumerate(evals, start=1)])


def drawn(curves: list[Curve], low: float, target: float | None) -> str:
    end_s = max(one.points[-1][0] for one in curves)
    high = max(value for one in curves for _, value in one.points) + 0.005
    frame = Frame(end_s=end_s, low=low, high=high)
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' {FONT} fill='{INK}'>",
            f"<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>",
            f"<clipPath id='inside'><rect x='{LEFT}' width='{WIDTH}' height='{HEIGHT - BOTTOM}'/></clipPath>",
            *grid(frame),
            *([level(frame, target)] if target is not None else []),
            *(line(frame, one, colour) for one, colour in zip(curves, RANK_COLOURS, strict=False)),
            *(name(one.mode, place, RANK_COLOURS[place]) for place, one in enumerate(curves)),
            "</svg>\n",
        ]
    )


def grid(frame: Frame) -> list[str]:
    values = [frame.low + 0.02 * step for step in range(100) if frame.low + 0.02 * step <= frame.high]
    seconds = range(0, int(frame.end_s) + 1, 60)
    return [
        *(
            f"<path d='M{LEFT} {frame.y(value):.1f}H{WIDTH - RIGHT}' stroke='{LINE}'/>"
            f"<text x='{LEFT - 8}' y='{frame.y(value) + 4:.1f}' text-anchor='end'>{value:.0%}</text>"
            for value in values
        ),
        *(
            f"<text x='{frame.x(second):.1f}' y='{HEIGHT - BOTTOM + 20}' text-anchor='middle'>{second}</text>"
            for second in seconds
        ),
        f"<text x='{(LEFT + WIDTH - RIGHT) / 2}' y='{HEIGHT - 6}' text-anchor='middle' fill='{QUIET}'>"
        "seconds of training</text>",
    ]


def level(frame: Frame, value: float) -> str:
    return (
        f"<path d='M{LEFT} {frame.y(value):.1f}H{WIDTH - RIGHT}' stroke='{QUIET}' stroke-dasharray='4 3'/>"
        f"<text x='{LEFT + 6}' y='{frame.y(value) - 5:.1f}' fill='{QUIET}'>{value:.1%}</text>"
    )


def line(frame: Frame, one: Curve, colour: str) -> str:
    places = [f"{frame.x(second):.1f} {frame.y(value):.1f}" for second, value in one.points]
    look = f"fill='none' stroke='{colour}' stroke-width='1.6' clip-path='url(#inside)'"
    return f"<path d='M{'L'.join(places)}' {look}/>"


def name(mode: str, place: int, colour: str) -> str:
    y = TOP + 18 + 20 * place
    return (
        f"<path d='M{WIDTH - RIGHT + 12} {y - 4}h18' stroke='{colour}' stroke-width='3'/>"
        f"<text x='{WIDTH - RIGHT + 36}' y='{y}'>{mode}</text>"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw learning against time.")
    parser.add_argument("runs", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--modes", default="solo-0,nccl-async,nccl-cadence,nccl-balanced,nccl-sync")
    parser.add_argument("--from", dest="low", type=float, default=0.8)
    given = parser.parse_args()
    modes = given.modes.split(",")
    group = next(group for group in group_runs(read_runs(given.runs)) if all(group.timed(mode) for mode in modes))
    curves = [curve(group, mode) for mode in modes]
    given.file.write_text(drawn(curves, given.low, group.subject.target))
    print(f"{given.file}, {given.file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
