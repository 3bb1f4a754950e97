"""What a lease costs in the store of a run and in torch's TCPStore, side by side: python benchmarks/leases.py

Two ranks take leases at the same time, as training does. The stores take turns, so that other load hurts both alike.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from outrider.data.leases import StoreLeases
from outrider.launch.launcher import launch
from outrider.machine.devices import parse_devices
from outrider.policy.effects import Lease, Take
from outrider.world.messages import Link
from outrider.world.world import World

ROUNDS, TAKES, PAUSE_S = 20, 100, 0.002


def measure(link: Link, pauses_s: list[float]) -> None:
    with World.join(link, timeout_s=300) as world:
        port = world.environment.master_port
        tcp = TCPStore("127.0.0.1", port, is_master=world.rank == 0, wait_for_workers=False)
        stores: dict[str, Any] = {"private": world.store, "tcp": PrefixStore("leases", tcp)}
        for pause_s in pauses_s:
            times: dict[str, list[float]] = {name: [] for name in stores}
            for turn in range(ROUNDS):
                for name, store in stores.items():
                    world.barrier(f"{name} {turn} {pause_s}")
                    times[name] += takes(store, f"{turn}-{pause_s}", rank=world.rank, pause_s=pause_s)
            link.send("times", pause_s=pause_s, times=times)
        world.barrier("the end")


def takes(store: Any, key: str, *, rank: int, pause_s: float) -> list[float]:
    leases = StoreLeases(store, key, Lease(0, 10_000_000), rank=rank, batch_size=32)
    found = []
    for _ in range(TAKES):
        time.sleep(pause_s)
        start_s = time.perf_counter()
        leases.take(Take(samples=128, share=0.5))
        found.append((time.perf_counter() - start_s) * 1e6)
    return found


def main() -> None:
    devices = parse_devices("cpu,cpu")
    with (
        tempfile.TemporaryDirectory() as folder,
        launch(measure, {"pauses_s": [PAUSE_S, 0.0]}, devices=devices, log_dir=Path(folder)) as ranks,
    ):
        told = [message.fields for message in ranks.messages() if message.kind == "times"]
        ranks.raise_error()
    for pause_s in (PAUSE_S, 0.0):
        for name in ("private", "tcp"):
            samples = sorted(one for fields in told if fields["pause_s"] == pause_s for one in fields["times"][name])
            tenths = statistics.quantiles(samples, n=10)
            line = {
                "store": name,
                "pause_ms": pause_s * 1e3,
                "n": len(samples),
                "median_us": statistics.median(samples),
            }
            json.dump(line | {"p10_us": tenths[0], "p90_us": tenths[-1]}, sys.stdout)
            print()


if __name__ == "__main__":
    main()
