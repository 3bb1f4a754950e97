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
from outrider.rank.host_threads import HostThreads
from outrider.world.world import World

REPEATS = 5
# Another program may slow a device down for tenths of a second. Speeds that would let the fastest rank begin alone, but
# not by much, are measured again; the best of each rank counts.
TIMES_IN_DOUBT = 4
PAUSE_IN_DOUBT_S = 0.15
GAIN_PART = 0.5
"""The part of the gain of products by more threads that a training step is expected to have."""
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


def gains_alone(world: World, threads: HostThreads, *, fastest: int) -> tuple[float, ...]:
    """How many times as fast each rank is expected to work while others rest and leave it their cores; all call this.

    Measured on the fastest rank, for products. A training step also has parts that gain nothing from more threads: with
    steps of the models in `outrider bench`, the gain is between nothing and that of products. So half of it counts.
    """
    told = world.exchange_json(threads.has_more_alone, name="cores", what="the cores of ranks that may rest")
    if not any(told):
        return (1.0,) * world.size
    gain = 1.0
    if world.rank == fastest and threads.has_more_alone:
        beside_others = measured_speed(world.device)
        with threads.of(is_alone=True):
            gain = max(1.0, measured_speed(world.device) / beside_others)
    gain = max(world.exchange_json(gain, name="gains", what="the speed of the fastest device alone"))
    return tuple(1 + GAIN_PART * (gain - 1) if has_more else 1.0 for has_more in told)


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
