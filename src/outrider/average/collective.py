"""Decides how tensors of several ranks become one: sums, maxima and broadcasts over torch.distributed, or in process.

Does not know what the tensors mean. Called by the averagers and the rank driver; `meet` by the lab and the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from outrider.average.exchange import Exchange
from outrider.errors import PeerLostError, WaitError


class Collective(Protocol):
    """In place and on every rank; collectives run in the same order on all ranks."""

    def sum_(self, tensors: Sequence[Tensor]) -> None: ...

    def max_(self, tensors: Sequence[Tensor]) -> None: ...

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None: ...


class Exchanged(Protocol):
    """What `meet` brings together: Exchange and GradientExchange."""

    @property
    def rank(self) -> int: ...

    @property
    def wires(self) -> list[Tensor]: ...

    @property
    def maxima(self) -> list[Tensor]: ...


class GroupCollective:
    """Over a process group: Gloo for host tensors, NCCL for CUDA tensors; `what` names the cargo in errors.

    With Gloo a call returns when the result is there, with NCCL when it is ordered on the current stream.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, what: str = "parameters") -> None:
        self._group = group
        self._what = what
        self.backend = dist.get_backend(group)
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        self._all_reduce(tensors, dist.ReduceOp.SUM)

    def max_(self, tensors: Sequence[Tensor]) -> None:
        self._all_reduce(tensors, dist.ReduceOp.MAX)

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        self._run(
            tensors,
            lambda tensor: dist.broadcast(tensor, group=self._group, group_src=source, async_op=True),
        )

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """The integers of every rank, in rank order."""
        device = "cuda" if self.backend == "nccl" else "cpu"
        table = torch.zeros(self.world_size, len(values), dtype=torch.int64, device=device)
        table[self.rank] = torch.tensor(values, dtype=torch.int64)
        self.sum_([table])
        rows: list[list[int]] = table.tolist()
        return rows

    def _all_reduce(self, tensors: Sequence[Tensor], operation: dist.ReduceOp.RedOpType) -> None:
        self._run(tensors, lambda tensor: dist.all_reduce(tensor, operation, group=self._group, async_op=True))

    def _run(self, tensors: Sequence[Tensor], start: Callable[[Tensor], dist.Work | None]) -> None:
        for tensor in tensors:
            # Gloo has had races between host and device with CUDA tensors; the host path makes its own copies.
            assert tensor.is_cuda == (self.backend == "nccl"), f"{self.backend} was handed a {tensor.device} tensor"
        try:
            # Started together, waited for together: small tensors share one round trip.
            for work in [start(tensor) for tensor in tensors]:
                if work is not None:
                    work.wait()
        except RuntimeError as error:
            num_bytes = sum(tensor.nbytes for tensor in tensors)
            raise PeerLostError(
                f"rank {self.rank} of {self.world_size} lost a peer while exchanging {self._what} "
                f"({num_bytes:,} bytes over {self.backend}): {_first_line(error)}",
                hint="look for the first error among the other ranks",
                rank=self.rank,
            ) from error


@torch.no_grad()
def meet(exchanges: Sequence[Exchanged]) -> None:
    """Sum the wires of exchanges of one process in rank order and give each the sum; counters take the maximum.

    For two ranks this is bit-identical to Gloo, which for more adds in another order.
    """
    first, *others = sorted(exchanges, key=lambda exchange: exchange.rank)
    for other in others:
        for mine, theirs in zip(first.wires, other.wires, strict=True):
            mine.add_(theirs)
        for mine, theirs in zip(first.maxima, other.maxima, strict=True):
            torch.maximum(mine, theirs, out=mine)
    for other in others:
        for mine, theirs in zip([*first.wires, *first.maxima], [*other.wires, *other.maxima], strict=True):
            theirs.copy_(mine)


def overdue(exchange: Exchange, *, number: int, timeout_s: float) -> WaitError:
    """What to raise when the other ranks did not come."""
    return WaitError(
        f"rank {exchange.rank} waited {timeout_s:g} s for average {number} "
        f"to be summed by all {exchange.world_size} ranks",
        hint="a rank may be stuck or far slower than the others: look at the rank logs",
        rank=exchange.rank,
    )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
