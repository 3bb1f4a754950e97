"""One rank of a two-rank all-reduce whose numbers are compared; prints one line of JSON.

Usage: all_reduce.py RANK DEVICE BACKEND STORE_FILE. Needs nothing but the standard library and torch.
"""

from __future__ import annotations

import importlib
import json
import sys
from datetime import timedelta
from typing import Any

NUM_ELEMENTS = 1_000_003
WORLD_SIZE = 2
ROUNDS = 5
WAIT = timedelta(seconds=60)


def check(torch: Any, rank: int, device: str) -> dict[str, Any]:
    index = torch.arange(NUM_ELEMENTS, device=device, dtype=torch.float32) % 1024
    for turn in range(ROUNDS):
        values = index + rank + turn
        torch.distributed.all_reduce(values)
        # Sums of small whole numbers are exact in float32, so one wrong bit shows.
        expected = WORLD_SIZE * (index + turn) + sum(range(WORLD_SIZE))
        wrong = int((values != expected).sum().item())
        if wrong:
            return {"outcome": "wrong", "detail": f"{wrong} of {NUM_ELEMENTS} sums differ in round {turn}"}
    return {"outcome": "ok", "detail": None}


def main(rank: int, device: str, backend: str, store: str) -> None:
    torch = importlib.import_module("torch")
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    group = importlib.import_module("torch.distributed")
    group.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE, timeout=WAIT)
    print(json.dumps(check(torch, rank, device)))
    group.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:5])
