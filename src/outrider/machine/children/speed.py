"""Measures matrix multiplication and memory copy of one device for about two seconds, as one line of JSON.

Usage: speed.py DEVICE SECONDS. Needs nothing but the standard library and torch, which it imports late.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

MATMUL_SIDE = {"cpu": 768, "cuda": 4096}
COPY_BYTES = {"cpu": 64 * 2**20, "cuda": 256 * 2**20}


def measure(torch: Any, device: str, seconds: float) -> dict[str, float]:
    kind = device.partition(":")[0]
    side = MATMUL_SIDE[kind]
    left = torch.randn(side, side, device=device)
    source = torch.empty(COPY_BYTES[kind], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    matmul_s = seconds_per_call(torch, device, lambda: left @ left, seconds / 2)
    copy_s = seconds_per_call(torch, device, lambda: target.copy_(source), seconds / 2)
    # A copy reads and writes every byte.
    return {"matmul_tflops": 2 * side**3 / matmul_s / 1e12, "memory_gb_per_s": 2 * COPY_BYTES[kind] / copy_s / 1e9}


def seconds_per_call(torch: Any, device: str, work: Callable[[], Any], seconds: float) -> float:
    wait = torch.cuda.synchronize if device.startswith("cuda") else (lambda: None)
    for _ in range(3):
        work()
    wait()
    calls, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for _ in range(5):
            work()
        wait()
        calls += 5
    return (time.perf_counter() - begin) / calls


if __name__ == "__main__":
    torch = importlib.import_module("torch")
    if sys.argv[1].startswith("cuda"):
        torch.cuda.set_device(sys.argv[1])
    print(json.dumps(measure(torch, sys.argv[1], float(sys.argv[2]))))
