"""One rank of a pair on one GPU: runs every scenario and writes what it found as JSON.

Not a test itself; test_device.py starts two of these. Usage: cuda_rank.py RANK FOLDER
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from outrider.average.arena import Arena
from outrider.average.checks import Verifier
from outrider.average.device_average import DeviceAverager
from outrider.average.exchange import Exchange
from outrider.average.gradients import GradientExchange
from outrider.average.host_average import CudaLane, HostAverager
from outrider.average.optimizer_state import OptimizerArena
from outrider.average.outer import Outer
from outrider.average.rank_facts import Settled
from outrider.average.transport.collective import GroupCollective
from outrider.errors import VerifyError

NUM_AVERAGES = 40
Averager = DeviceAverager | HostAverager


def build(device: str) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(333, 170), nn.BatchNorm1d(170), nn.Linear(17, 5, dtype=torch.bfloat16)]
    return nn.ModuleList(layers).to(device)


def move(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            step = torch.randn(parameter.shape, generator=generator).mul_(0.01)
            parameter.add_(step.to(parameter.device, parameter.dtype))


def make(
    rank: int,
    device: str,
    collective: GroupCollective,
    gate: GroupCollective,
    *,
    outer: Outer | None = None,
    wire: str = "fp32",
) -> Averager:
    model = build(device)
    on = "cuda" if collective.transport == "nccl" else "cpu"
    exchange = Exchange(Arena(model), rank=rank, world_size=2, num_facts=1, outer=outer, device=on, wire=wire)
    exchange.model = model  # type: ignore[attr-defined]
    verifier = Verifier(rank, collective.gather)
    if on == "cpu":
        return HostAverager(exchange, collective, verify=verifier, timeout_s=60)
    return DeviceAverager(exchange, collective, await_others=lambda: gate.gather([rank]), verify=verifier, timeout_s=60)


def many_averages(averager: Averager) -> dict[str, Any]:
    """Blocking and overlapped in turn, with steps in between, all verified."""
    exchange = averager.exchange
    model, rank = exchange.model, exchange.rank  # type: ignore[attr-defined]
    settled: list[Settled] = []
    with averager:
        for number in range(NUM_AVERAGES):
            move(model, seed=2 * number + rank)
            if number % 2:
                averager.begin(rank + 1, [0.0])
                move(model, seed=-number - rank - 1)
                settled.append(averager.correct())
            else:
                settled.append(averager.average(rank + 1, [0.0]))
        settled.append(averager.average(1, [0.0]))
    return {
        "drifts": [one.drift for one in settled],
        "values": [value for flat in exchange.arena.flats.values() for value in flat.double().tolist()],
        "has_timings": all(one.snapshot_ms and one.transfer_ms and one.total_ms for one in settled),
    }


class ImpatientLane(CudaLane):
    """The race to be caught: the snapshot is late on a stream of its own, and is read before it arrived."""

    def stage(self, stage: Callable[[], None], exchange: Exchange) -> None:
        super().stage(exchange.stage_live, exchange)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(400_000_000)
            stage()

    def wait_snapshot(self) -> float:
        return 0.0


def early_read(rank: int, collective: GroupCollective) -> str:
    averager = make(rank, "cuda", collective, collective)
    with averager:
        averager.average(1, [0.0])
        if rank == 1:
            averager._lane = ImpatientLane(torch.device("cuda", 0))
        move(averager.exchange.model, seed=rank)
        averager.begin(1, [0.0])
        try:
            averager.load()
        except VerifyError as error:
            return error.message
    return "not caught"


def shared_gradients(rank: int, collective: GroupCollective) -> list[float]:
    on = "cuda" if collective.transport == "nccl" else "cpu"
    model = nn.Linear(2, 1).cuda()
    exchange = GradientExchange(Arena(model), rank=rank, world_size=2, num_facts=0, device=on)
    model(torch.full((1, 2), float(rank + 1), device="cuda")).sum().backward()
    exchange.pack(1 + 2 * rank, [])
    collective.sum_(exchange.wires)
    exchange.settle()
    return [value for p in model.parameters() for value in p.grad.flatten().tolist()]


def steps_of_the_first(averager: Averager, store: dist.Store) -> int:
    """Rank 1 comes to the average only when rank 0 has ended steps that it took after it came there."""
    model, rank = averager.exchange.model, averager.exchange.rank  # type: ignore[attr-defined]
    steps = 0
    with averager:
        if rank == 1:
            store.wait(["steps are done"])
        averager.begin(1, [0.0])
        if rank == 0:
            for steps in range(1, 21):
                move(model, seed=steps)
            torch.cuda.current_stream().synchronize()
            store.set("steps are done", "yes")
        averager.correct()
    return steps


def optimizer_state(rank: int, collective: GroupCollective, gate: GroupCollective) -> list[float]:
    averager = make(rank, "cuda", collective, gate)
    model = averager.exchange.model
    optimizer = torch.optim.Adam(model.parameters())
    model[0](torch.full((1, 333), float(rank + 1), device="cuda")).sum().backward()
    optimizer.step()
    averager.exchange.attach(OptimizerArena(optimizer))
    with averager:
        averager.average(1, [0.0])
    return [value.max().item() for value in (optimizer.state[model[0].weight][k] for k in ("exp_avg", "exp_avg_sq"))]


def main(rank: int, folder: Path) -> None:
    torch.cuda.set_device(0)
    store = dist.FileStore(str(folder / "store"), 2)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, timeout=timeout)
    nccl = GroupCollective()
    gloo, gate = (GroupCollective(dist.new_group(backend="gloo", timeout=timeout)) for _ in range(2))
    found = {
        "nccl": many_averages(make(rank, "cuda", nccl, gate)),
        "nccl_outer": many_averages(make(rank, "cuda", nccl, gate, outer=Outer(kind="nesterov", momentum=0.5))),
        "gloo": many_averages(make(rank, "cuda", gloo, gate)),
        "mixed": many_averages(make(rank, ("cuda", "cpu")[rank], gloo, gate)),
        "nccl_int8": many_averages(make(rank, "cuda", nccl, gate, wire="int8")),
        "mixed_bf16": many_averages(make(rank, ("cuda", "cpu")[rank], gloo, gate, wire="bf16")),
        "steps_of_the_first": steps_of_the_first(make(rank, "cuda", nccl, gate), store),
        "early_read": early_read(rank, gloo),
        "gradients": {"nccl": shared_gradients(rank, nccl), "gloo": shared_gradients(rank, gloo)},
        "optimizer": {"nccl": optimizer_state(rank, nccl, gate), "gloo": optimizer_state(rank, gloo, gate)},
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
