"""Measures in a few milliseconds how fast each rank's device multiplies, so that the first batch is split well.

With an even split, the fast device waits for the slow one: beside a device of a tenth of its speed, each such step
takes five times as long. Equal first windows do the same. Called by `RankLife` before the first step; from then on
real steps count.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from outrider.policy.alone import SMALL_HELP
from outrider.policy.weights import relative_speeds
from outrider.world.world import World

REPEATS = 5
# Another program may slow a device down for tenths of a second. Speeds that would let the fastest rank begin alone, but
# not by much, are measured again; the best of each rank counts.
TIMES_IN_DOUBT = 4
PAUSE_IN_DOUBT_S = 0.15
_SIDE = {"cuda": 2048, "cpu": 256}
_PRODUCTS = {"cuda": 4, "cpu": 8}


def speeds_of_all(world: World) -> tuple[float, ...]:
    """Relative speeds of the devices of all ranks, the same on every rank; all ranks call this."""
    best = (0.0,) * world.size
    for attempt in range(TIMES_IN_DOUBT):
        if attempt:
            time.sleep(PAUSE_IN_DOUBT_S)
        own = measured_speed(world.device) * world.spec.speed
        told = world.exchange_json(own, name="speeds", what="the speeds of the devices")
        best = tuple(map(max, best, told))
        if not is_doubtful(best):
            break
    return relative_speeds(best)


def is_doubtful(speeds: Sequence[float]) -> bool:
    """Whether the other ranks together have nearly the speed with which they would take part from the start."""
    fastest = max(speeds)
    others = sum(speeds) - fastest
    return SMALL_HELP / 2 < others / fastest <= SMALL_HELP


def measured_speed(device: torch.device) -> float:
    """Multiplications per second of this device in matrix products, in no particular unit; the best of a few tries."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    side, products = _SIDE[kind], _PRODUCTS[kind]
    one = torch.ones(side, side, device=device)
    out = torch.empty_like(one)
    best_s = float("inf")
    for _ in range(1 + REPEATS):
        started_s = time.perf_counter()
        for _ in range(products):
            torch.mm(one, one, out=out)
        if kind == "cuda":
            torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - started_s)
    return products * side**3 / best_s
