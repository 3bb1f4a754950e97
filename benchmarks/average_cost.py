"""What one average costs beside the machine's own bandwidth, measured in one run.

For every number of ranks, device, transport and size, each round times in turn: the machine's own operations on the
same number of float32 values (copy and add in host memory, copies to and from the device, a bare all-reduce of the
same bytes), then a blocking average and an average in the background. All ranks run each at the same time, and the
slowest counts. The limit of a pipeline is the slowest of device to host, one addition in host memory, and host to
device; ranks on the CPU copy nothing, and over Gloo the bare all-reduce takes the place of the addition. On NCCL the
limit is the bare all-reduce. Prints a table, then one line of JSON. That also has the processor time of each operation,
which says more than the wall time on a busy machine. Takes two to five minutes.

    python benchmarks/average_cost.py  # CPU ranks, and slices of cuda:0 where there is one
    python benchmarks/average_cost.py --millions 25 --ranks 2 --transports shared_memory
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from outrider.average.arena import Arena
from outrider.average.averager import Averager
from outrider.average.device_average import DeviceAverager
from outrider.average.exchange import Exchange
from outrider.average.host_average import HostAverager
from outrider.average.transport.collective import GroupCollective, RankCollective
from outrider.average.transport.shared_memory_sums import SharedMemoryCollective
from outrider.machine.devices import parse_devices, threads_per_rank
from outrider.record.run_record import commit
from outrider.slices.mps import slices
from outrider.world import nccl_environment

MILLIONS = (1, 25, 124, 350)
TRANSPORTS = ("shared_memory", "gloo", "nccl")
PARAMETER = 2**22
"""Elements of each parameter of the model."""
WAIT_S = 240.0
# Of each rank, per parameter: the model, the buffers of an average, and those of the bare operations.
HOST_BYTES = {"cpu": 36, "cuda": 24}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """The measurements of one number of ranks on one kind of device."""

    devices: tuple[str, ...]
    transports: tuple[str, ...]
    millions: tuple[float, ...]
    seconds_per_size: float
    threads: int

    @property
    def num_ranks(self) -> int:
        return len(self.devices)

    @property
    def kind(self) -> str:
        return "cuda" if self.devices[0].startswith("cuda") else "cpu"


class Values(nn.Module):
    """A model of a number of parameters, in tensors of ordinary size."""

    def __init__(self, numel: int, device: torch.device) -> None:
        super().__init__()
        sizes = [PARAMETER] * (numel // PARAMETER) + [numel % PARAMETER]
        self.values = nn.ParameterList([nn.Parameter(torch.ones(size, device=device)) for size in sizes if size])

    @torch.no_grad()
    def step(self, rank: int) -> None:
        torch._foreach_add_(list(self.values), 1e-3 * (rank + 1))


def main() -> None:
    options = parse_options()
    if options.rank is not None:
        run_rank(options.rank, Case(**json.loads(options.case)), Path(options.folder))
        return
    started_s = time.perf_counter()
    rows = [row for case in cases(options) for row in measure(case)]
    print(table(rows))
    record = {
        "schema_version": 1,
        "benchmark": "average_cost",
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "seconds": round(time.perf_counter() - started_s, 1),
        "rows": rows,
    }
    text = json.dumps(record, separators=(",", ":"))
    print(text)
    if options.json:
        Path(options.json).write_text(text + "\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, nargs="+", default=list(MILLIONS), help="millions of parameters")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--kinds", nargs="+", choices=["cpu", "cuda"], default=["cpu", "cuda"])
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--seconds", type=float, default=2.5, help="for each transport and size")
    parser.add_argument("--threads", type=int, default=0, help="host threads per rank; 0 is what a run would get")
    parser.add_argument("--json", help="a file for the record")
    for hidden in ("--rank", "--case", "--folder"):
        parser.add_argument(hidden, type=int if hidden == "--rank" else str, help=argparse.SUPPRESS)
    return parser.parse_args()


def cases(options: argparse.Namespace) -> list[Case]:
    found = []
    kinds = [kind for kind in options.kinds if kind == "cpu" or torch.cuda.is_available()]
    for kind, num_ranks in itertools.product(kinds, options.ranks):
        # Shares as in a run of unequal slices; four ranks share the GPU evenly.
        shares = (60, 25) if num_ranks == 2 else (100 // num_ranks,) * num_ranks
        devices = tuple("cpu" if kind == "cpu" else f"cuda:0%{share}" for share in shares[:num_ranks])
        transports = tuple(name for name in options.transports if name != "nccl" or kind == "cuda")
        threads = options.threads or max(1, min(threads_per_rank(parse_devices(list(devices)), os.cpu_count() or 1)))
        found.append(
            Case(
                devices=devices,
                transports=transports,
                millions=tuple(m for m in options.millions if fits(m, kind, num_ranks)),
                seconds_per_size=options.seconds,
                threads=threads,
            )
        )
    return [case for case in found if case.millions and case.transports]


def fits(millions: float, kind: str, num_ranks: int) -> bool:
    needed = millions * 1e6 * HOST_BYTES[kind] * num_ranks
    is_fitting = needed < 0.8 * psutil.virtual_memory().available
    if not is_fitting:
        print(f"{millions:g} M on {num_ranks} {kind} ranks left out: {needed / 2**30:.1f} GiB", file=sys.stderr)
    return is_fitting


def measure(case: Case) -> list[dict[str, Any]]:
    """Start the ranks and merge their times: the slowest rank of each round, then the median of the rounds."""
    with tempfile.TemporaryDirectory() as folder, slices(parse_devices(list(case.devices))) as variables:
        command = [sys.executable, __file__, "--case", json.dumps(asdict(case)), "--folder", folder, "--rank"]
        ranks = [
            subprocess.Popen([*command, str(rank)], env=os.environ | variables[rank]) for rank in range(case.num_ranks)
        ]
        try:
            codes = [rank.wait(WAIT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if any(codes):
            raise SystemExit(f"a rank of {case.devices} ended with {codes}")
        found = [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(case.num_ranks)]
    return [merged(case, rows) for rows in zip(*found, strict=True)]


def merged(case: Case, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    slowest = {
        name: [max(times) for times in zip(*(row["ms"][name] for row in rows), strict=True)] for name in rows[0]["ms"]
    }
    median = {name: statistics.median(times) for name, times in slowest.items()}
    stages = ("device_to_host", "host_add", "host_to_device", "all_reduce")
    needed = ("all_reduce",) if rows[0]["transport"] == "nccl" else stages
    limit = max(median[name] for name in needed if name in median)
    return {
        "kind": case.kind,
        "devices": case.devices,
        "threads": case.threads,
        "transport": rows[0]["transport"],
        "millions": rows[0]["millions"],
        "rounds": len(slowest["average"]),
        "ms": {name: round(value, 2) for name, value in median.items()},
        "least_ms": {name: round(min(times), 2) for name, times in slowest.items()},
        "processor_ms": {
            name: round(max(statistics.median(row["processor_ms"][name]) for row in rows), 2) for name in median
        },
        "limit_ms": round(limit, 2),
        "ratio": round(median["average"] / limit, 2),
        "background_ratio": round(median["background"] / limit, 2),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    names = ("host_copy", "host_add", "device_to_host", "host_to_device", "all_reduce", "average", "background")
    head = f"{'ranks':<8} {'transport':<14} {'M':>6} " + " ".join(f"{name:>14}" for name in names)
    lines = [f"{head} {'limit':>9} {'ratio':>6} {'behind':>6}   (ms, medians; ratios to the limit)"]
    for row in rows:
        cells = " ".join(f"{row['ms'].get(name, float('nan')):>14.2f}" for name in names).replace("nan", "  -")
        lines.append(
            f"{len(row['devices'])} {row['kind']:<6} {row['transport']:<14} {row['millions']:>6g} {cells}"
            f" {row['limit_ms']:>9.2f} {row['ratio']:>6.2f} {row['background_ratio']:>6.2f}"
        )
    return "\n".join(lines)


# In a rank.


def run_rank(rank: int, case: Case, folder: Path) -> None:
    torch.set_num_threads(case.threads)
    device = torch.device("cuda", 0) if case.kind == "cuda" else torch.device("cpu")
    timeout = datetime.timedelta(seconds=WAIT_S)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with ExitStack() as stack:
        if case.kind == "cuda":
            torch.cuda.set_device(device)
            seats = [nccl_environment.take_seat(device=str(device), host="here", gpu_index=0)] * case.num_ranks
            stack.enter_context(nccl_environment.told(nccl_environment.variables(rank, seats)))
        store = dist.FileStore(str(folder / "store"), case.num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=case.num_ranks, timeout=timeout)
        stack.callback(dist.destroy_process_group)
        collectives = {name: open_transport(name, rank, case.num_ranks, store) for name in case.transports}
        rows = [
            one_size(rank, case, device, name, collective, millions)
            for millions in case.millions
            for name, collective in collectives.items()
        ]
        (folder / f"rank{rank}.json").write_text(json.dumps(rows))
        dist.barrier()


def open_transport(name: str, rank: int, world_size: int, store: dist.Store) -> RankCollective:
    if name != "shared_memory":
        return GroupCollective(dist.new_group(backend=name))
    numbers = itertools.count()

    def exchange(value: Any) -> list[Any]:
        number = next(numbers)
        store.set(f"{number}/{rank}", json.dumps(value))
        return [json.loads(store.get(f"{number}/{other}")) for other in range(world_size)]

    return SharedMemoryCollective.open(rank, exchange=exchange, timeout_s=WAIT_S)


def one_size(
    rank: int, case: Case, device: torch.device, name: str, collective: RankCollective, millions: float
) -> dict[str, Any]:
    model = Values(round(millions * 1e6), device)
    with make_averager(model, rank, case.num_ranks, name, collective) as averager:
        operations = {
            **bare_operations(sum(p.numel() for p in model.parameters()), device, name, collective),
            "average": lambda: averager.average(1, [0.0]),
            "background": lambda: behind(averager),
        }
        ms: dict[str, list[float]] = {operation: [] for operation in operations}
        processor_ms: dict[str, list[float]] = {operation: [] for operation in operations}
        is_last, started_s = False, 0.0
        for number in itertools.count():
            for operation, call in operations.items():
                model.step(rank)
                dist.barrier()
                wall_ms, busy_ms = timed_ms(call, device)
                ms[operation].append(wall_ms)
                processor_ms[operation].append(busy_ms)
            if is_last:
                break
            if number == 0:
                # The first round touches memory for the first time.
                for times in (*ms.values(), *processor_ms.values()):
                    times.clear()
                started_s = time.perf_counter()
            is_last = agreed(number >= 2 and time.perf_counter() - started_s > case.seconds_per_size)
    return {"transport": name, "millions": millions, "ms": ms, "processor_ms": processor_ms}


def make_averager(model: nn.Module, rank: int, world_size: int, name: str, collective: RankCollective) -> Averager:
    on = "cuda" if name == "nccl" else "cpu"
    exchange = Exchange(Arena(model), rank=rank, world_size=world_size, num_facts=1, device=on)
    if name == "nccl":
        return DeviceAverager(exchange, collective, await_others=dist.barrier)
    return HostAverager(exchange, collective)


def bare_operations(
    numel: int, device: torch.device, name: str, collective: RankCollective
) -> dict[str, Callable[[], object]]:
    is_cuda = device.type == "cuda"
    mine, other = (torch.ones(numel, pin_memory=is_cuda) for _ in range(2))
    there = torch.ones(numel if is_cuda else 0, device=device)
    operations: dict[str, Callable[[], object]] = {
        "host_copy": lambda: mine.copy_(other),
        "host_add": lambda: torch.add(mine, other, out=mine),
    }
    if is_cuda:
        operations["device_to_host"] = lambda: mine.copy_(there, non_blocking=True)
        operations["host_to_device"] = lambda: there.copy_(mine, non_blocking=True)
    if name != "shared_memory":
        travelling: Tensor = there if name == "nccl" else mine
        operations["all_reduce"] = lambda: collective.sum_([travelling])
    return operations


def timed_ms(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Wall time, and processor time of all threads of this rank."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started_s, busy_s = time.perf_counter(), time.process_time()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started_s) * 1e3, (time.process_time() - busy_s) * 1e3


def behind(averager: Averager) -> None:
    averager.begin(1, [0.0])
    averager.correct()


def agreed(is_last: bool) -> bool:
    """Whether any rank wants to stop, the same answer on all of them."""
    votes = torch.tensor([int(is_last)])
    dist.all_reduce(votes, dist.ReduceOp.MAX)
    return bool(votes.item())


if __name__ == "__main__":
    main()
