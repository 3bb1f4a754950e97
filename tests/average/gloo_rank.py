"""One rank of a pair over real Gloo: runs every scenario and writes what it found as JSON.

Not a test itself; test_collective.py starts two of these. Usage: gloo_rank.py RANK FOLDER
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outrider.average.arena import Arena
from outrider.average.checks import Verifier
from outrider.average.exchange import Exchange
from outrider.average.gradients import GradientExchange
from outrider.average.host_average import HostAverager
from outrider.average.overlap import Overlap
from outrider.average.transport.collective import GroupCollective, meet, meet_pieces
from outrider.average.wire_codec import WIRES
from outrider.errors import PeerLostError

NUM_AVERAGES = 1_000


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.ModuleList([nn.Linear(33, 17), nn.BatchNorm1d(17), nn.Linear(17, 5, dtype=torch.bfloat16)])


def move(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype), alpha=0.01)


def words(model: nn.Module) -> list[int]:
    flats = Arena(model).flats.values()
    return [word for flat in flats for word in flat.view(torch.uint8).tolist()]


def meet_and_gloo_agree(rank: int, collective: GroupCollective) -> bool:
    """The pair averaged in this process, and for real: the same bits, on every wire?"""
    return all(agrees_on(wire, rank, collective) for wire in WIRES)


def agrees_on(wire: str, rank: int, collective: GroupCollective) -> bool:
    models = [build(0), build(0)]
    exchanges = [Exchange(Arena(model), rank=r, world_size=2, num_facts=2, wire=wire) for r, model in enumerate(models)]
    real = Exchange(Arena(build(0)), rank=rank, world_size=2, num_facts=2, wire=wire)
    for exchange, seed, samples in ((exchanges[0], 0, 7), (exchanges[1], 1, 12), (real, rank, (7, 12)[rank])):
        for flat in exchange.arena.flats.values():
            flat.add_(torch.randn(flat.shape, generator=torch.Generator().manual_seed(seed)).to(flat.dtype))
        exchange.snapshot()
        exchange.open(samples, [0.5, 1.5])
    expected = meet_pieces(exchanges)[rank]
    with HostAverager(real, collective, timeout_s=60) as averager:
        found = averager.average((7, 12)[rank], [0.5, 1.5])
    refs = zip(exchanges[rank].parts, real.parts, strict=True)
    return found.drift == expected.drift and all(torch.equal(a.ref, b.ref) for a, b in refs)


def many_averages(rank: int, collective: GroupCollective) -> dict[str, Any]:
    """Verified at every stage, blocking and overlapped in turn."""
    model = build(0)
    exchange = Exchange(Arena(model), rank=rank, world_size=2, num_facts=1)
    verifier = Verifier(rank, collective.gather)
    drifts: list[float | None] = []
    with HostAverager(exchange, collective, verify=verifier, timeout_s=60) as averager:
        for number in range(NUM_AVERAGES):
            move(model, seed=2 * number + rank)
            if number % 2:
                averager.begin(rank + 1, [0.0])
                move(model, seed=-number - rank - 1)
                drifts.append(averager.correct().drift)
            else:
                drifts.append(averager.average(rank + 1, [0.0]).drift)
        averager.average(1, [0.0])
    return {"windows": verifier.window + 1, "drifts": drifts, "words": words(model)}


def overlapped_gradients(rank: int, collective: GroupCollective) -> dict[str, Any]:
    """Sums begun by hooks of backward on rank 0, all at the end on rank 1: the same bits as in one process?

    The last two steps have two micro-batches.
    """
    models = [layers(), layers()]
    exchanges = [GradientExchange(Arena(one), rank=r, world_size=2, num_facts=1) for r, one in enumerate(models)]
    mine = layers()
    real = GradientExchange(Arena(mine), rank=rank, world_size=2, num_facts=1, bucket_bytes=1000)
    overlap = Overlap(real, collective)
    num_started, agrees = [], True
    for number in range(6):
        for one in (*models, mine):
            one.zero_grad(set_to_none=True)
            if number >= 4:
                backward(one, seed=number)
        for r, model in enumerate(models):
            backward(model, seed=2 * number + r)
            exchanges[r].pack(r + 1, [0.5])
        meet(exchanges)
        with overlap.backward(rank + 1) if rank == 0 else contextlib.nullcontext():
            backward(mine, seed=2 * number + rank)
        started = overlap.take_started()
        num_started.append(len(started))
        started += [collective.start_sum_(wire) for wire in real.pack(rank + 1, [0.5])]
        collective.wait(started)
        agrees &= real.settle() == exchanges[rank].settle()
        pairs = zip(mine.parameters(), models[rank].parameters(), strict=True)
        agrees &= all(torch.equal(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None)
    return {"started": num_started, "agrees": agrees}


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 20))


def backward(model: nn.Module, seed: int) -> None:
    model(torch.randn(4, 20, generator=torch.Generator().manual_seed(seed))).square().mean().backward()


def small_collectives(rank: int, collective: GroupCollective) -> dict[str, Any]:
    largest, sent = torch.tensor([rank, -rank]), torch.tensor([float(rank)])
    collective.max_([largest])
    collective.broadcast_([sent], source=1)
    return {"max": largest.tolist(), "broadcast": sent.item(), "gather": collective.gather([rank, 10 * rank])}


def refusal(collective: GroupCollective) -> str:
    try:
        collective.sum_([SimpleNamespace(is_cuda=True, device="cuda:0")])  # type: ignore[list-item]
    except AssertionError as error:
        return str(error)
    return "not refused"


def loss(collective: GroupCollective) -> dict[str, Any]:
    """What the rank that stays is told."""
    wire: list[Tensor] = [torch.zeros(1000)]
    try:
        collective.sum_(wire)
    except PeerLostError as error:
        return {"message": error.message, "hint": error.hint, "cause": type(error.__cause__).__name__}
    return {}


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
    collective = GroupCollective()
    found: dict[str, Any] = {
        "agrees": meet_and_gloo_agree(rank, collective),
        "many": many_averages(rank, collective),
        "overlapped": overlapped_gradients(rank, collective),
        "small": small_collectives(rank, collective),
        "refusal": refusal(collective),
    }
    if rank == 0:
        found["loss"] = loss(collective)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    # Gloo's threads of a group that lost a peer may abort while the interpreter is torn down; all is said already.
    os._exit(0)
