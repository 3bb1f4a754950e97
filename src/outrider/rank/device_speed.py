"""Measures in a few milliseconds how fast each rank's device multiplies, so that the first batch is split well.

An even split of the first steps makes the fast device wait for the slow one: beside a device of a tenth of its speed
each such step takes five times as long; equal first windows do the same. Called by `RankLife` before the first step;
from then on real steps count.
"""

from __future__ import annotations

import time

import torch

REPEATS = 5
_SIDE = {"cuda": 2048, "cpu": 256}
_PRODUCTS = {"cuda": 4, "cpu": 8}


def measured_speed(device: torch.device) -> float:
    """Products per second of this device, relative to nothing in particular; the best of a few tries."""
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
