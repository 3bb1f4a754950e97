"""Decides how tensors of several ranks become one: sums, maxima and broadcasts over torch.distributed, or in process.

Does not know what the tensors mean. Called by the averagers and the rank driver; `meet` by the lab and the tests.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend, ErrorType

from outrider.average.exchange import Exchange
from outrider.errors import PeerLostError, WaitError

_SPIN_S = 1e-3
_TURN_S = 2e-5


class Collective(Protocol):
    """In place and on every rank; collectives run in the same order on all ranks."""

    def sum_(self, tensors: Sequence[Tensor]) -> None: ...

    def max_(self, tensors: Sequence[Tensor]) -> None: ...

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None: ...

    def check_peers(self) -> None:
        """Raise where a peer is known to be lost; asked while a wait for the device lasts."""


class RankCollective(Collective, Protocol):
    """What the averages of a rank need beyond it."""

    transport: str
    """How sums travel, in a word or two."""
    rank: int
    world_size: int

    def start_sum_(self, tensor: Tensor) -> Started: ...

    def wait(self, sums: Sequence[Started]) -> None: ...

    def gather(self, values: Sequence[int]) -> list[list[int]]: ...

    def finish(self, timeout_s: float) -> None: ...


class Exchanged(Protocol):
    """What `meet` brings together: Exchange and GradientExchange."""

    @property
    def rank(self) -> int: ...

    @property
    def wires(self) -> list[Tensor]: ...

    @property
    def maxima(self) -> list[Tensor]: ...


@dataclass(frozen=True, slots=True)
class Started:
    """A collective that was begun; its tensor must be left alone until then."""

    tensor: Tensor
    work: dist.Work | None

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()


class GroupCollective:
    """Over a process group: Gloo for host tensors, NCCL for CUDA tensors; `what` names the cargo in errors.

    With Gloo a call returns when the result is there, with NCCL when it is ordered on the current stream.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, what: str = "parameters") -> None:
        self._group = group
        self._what = what
        self.transport: str = dist.get_backend(group)
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._communicator = _nccl_backend(group) if self.transport == "nccl" else None

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        self._all_reduce(tensors, dist.ReduceOp.SUM)

    def start_sum_(self, tensor: Tensor) -> Started:
        """Begin a sum, to be waited for with `wait`; sums begin in the same order on all ranks."""
        with self._guarded([tensor]):
            return Started(tensor, dist.all_reduce(tensor, group=self._group, async_op=True))

    def wait(self, sums: Sequence[Started]) -> None:
        """With Gloo until the results are there, with NCCL until they are ordered on the current stream."""
        for started in sums:
            with self._guarded([started.tensor]):
                started.wait()

    def max_(self, tensors: Sequence[Tensor]) -> None:
        self._all_reduce(tensors, dist.ReduceOp.MAX)

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        self._run(
            tensors,
            lambda tensor: dist.broadcast(tensor, group=self._group, group_src=source, async_op=True),
        )

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """The integers of every rank, in rank order."""
        return gather_by_sum(self, values, device="cuda" if self.transport == "nccl" else "cpu")

    def check_peers(self) -> None:
        """NCCL tells nobody of a peer that went away: what waits for it on the device just never ends."""
        if self._communicator is not None and self._communicator.get_error() != ErrorType.SUCCESS:
            raise self._lost(f"over {self.transport}: its communicator failed")

    def finish(self, timeout_s: float) -> None:
        """Wait until all that was started is done on the device as well; with Gloo it already is."""
        if self._communicator is None:
            return
        event = torch.cuda.Event()
        event.record()
        await_event(event, self, late=lambda: self._late(timeout_s), timeout_s=timeout_s)

    def _all_reduce(self, tensors: Sequence[Tensor], operation: dist.ReduceOp.RedOpType) -> None:
        self._run(tensors, lambda tensor: dist.all_reduce(tensor, operation, group=self._group, async_op=True))

    def _run(self, tensors: Sequence[Tensor], start: Callable[[Tensor], dist.Work | None]) -> None:
        with self._guarded(tensors):
            # Started together, waited for together: small tensors share one round trip.
            for started in [Started(tensor, start(tensor)) for tensor in tensors]:
                started.wait()

    @contextlib.contextmanager
    def _guarded(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        for tensor in tensors:
            # Gloo has had races between host and device with CUDA tensors; the host path makes its own copies.
            assert tensor.is_cuda == (self.transport == "nccl"), f"{self.transport} was handed a {tensor.device} tensor"
        try:
            yield
        except RuntimeError as error:
            num_bytes = sum(tensor.nbytes for tensor in tensors)
            raise self._lost(f"({num_bytes:,} bytes over {self.transport}): {_first_line(error)}") from error

    def _lost(self, trouble: str) -> PeerLostError:
        return PeerLostError(
            f"rank {self.rank} of {self.world_size} lost a peer while exchanging {self._what} {trouble}",
            hint="look for the first error among the other ranks",
            rank=self.rank,
        )

    def _late(self, timeout_s: float) -> WaitError:
        return WaitError(
            f"rank {self.rank} waited {timeout_s:g} s for {self._what} to be summed by all {self.world_size} ranks",
            hint="a rank may be stuck or far slower than the others: look at the rank logs",
            rank=self.rank,
        )


def gather_by_sum(collective: RankCollective, values: Sequence[int], *, device: str) -> list[list[int]]:
    """The integers of every rank: each fills its own row of a table of zeros."""
    table = torch.zeros(collective.world_size, len(values), dtype=torch.int64, device=device)
    table[collective.rank] = torch.tensor(values, dtype=torch.int64)
    collective.sum_([table])
    rows: list[list[int]] = table.tolist()
    return rows


@torch.no_grad()
def meet(exchanges: Sequence[Exchanged]) -> None:
    """Sum the wires of exchanges of one process in rank order and give each the sum; counters take the maximum.

    These are the bits of NeighbourCollective; of Gloo for two ranks, since for more it adds in another order.
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


def await_event(
    event: torch.cuda.Event, collective: Collective, *, late: Callable[[], WaitError], timeout_s: float
) -> None:
    """Ask again and again: torch has no timeout for events, and a peer that is gone never completes one."""
    started_s = time.monotonic()
    while not event.query():
        waited_s = time.monotonic() - started_s
        if waited_s > timeout_s:
            raise late()
        collective.check_peers()
        # Most sums end within a millisecond, which is about as long as the system's shortest sleep.
        if waited_s > _SPIN_S:
            time.sleep(_TURN_S)


def overdue(exchange: Exchange, *, number: int, timeout_s: float) -> WaitError:
    """What to raise when the other ranks did not come."""
    return WaitError(
        f"rank {exchange.rank} waited {timeout_s:g} s for average {number} "
        f"to be summed by all {exchange.world_size} ranks",
        hint="a rank may be stuck or far slower than the others: look at the rank logs",
        rank=exchange.rank,
    )


def _nccl_backend(group: dist.ProcessGroup | None) -> Backend:
    own = dist.group.WORLD if group is None else group
    assert own is not None, "a group comes with its default"
    return own._get_backend(torch.device("cuda"))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
