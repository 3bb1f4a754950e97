"""Collectives over tensors: sums, maxima and broadcasts over torch.distributed, or within one process.

Does not interpret the tensors. Called by the averagers and the averages of a rank; the lab calls `meet`.
"""

from __future__ import annotations

import abc
import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend, ErrorType

from outrider.average.exchange import Exchange
from outrider.average.rank_facts import Settled
from outrider.average.transport.packet_sums import add_packets
from outrider.errors import PeerLostError, WaitError

_SPIN_S = 1e-3
_TURN_S = 2e-5


class Collective(Protocol):
    """In-place collectives, called in the same order on all ranks."""

    def sum_(self, tensors: Sequence[Tensor]) -> None: ...

    def max_(self, tensors: Sequence[Tensor]) -> None: ...

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None: ...

    def check_peers(self) -> None:
        """Raise an error if a peer is known to be lost; called during waits for the device."""


class RankCollective(Collective, Protocol):
    """A collective with the additional methods that the averages of a rank need."""

    transport: str
    """The name of the transport."""
    rank: int
    world_size: int

    def start_sum_(self, tensor: Tensor) -> Started: ...

    def wait(self, sums: Sequence[Started]) -> None: ...

    def gather(self, values: Sequence[int]) -> list[list[int]]: ...

    def finish(self, timeout_s: float) -> None: ...


class Exchanged(Protocol):
    """The interface of the exchanges that `meet` sums: GradientExchange."""

    @property
    def rank(self) -> int: ...

    @property
    def wires(self) -> list[Tensor]: ...


@dataclass(frozen=True, slots=True)
class Started:
    """A started collective; its tensor must not be used until it is done."""

    tensor: Tensor
    work: dist.Work | None

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """The host of a rank, for error messages."""

    host: str
    address: str | None

    def __str__(self) -> str:
        return f"{self.host} ({self.address})"


class GroupCollective:
    """Collectives over a process group: Gloo for host tensors, NCCL for CUDA tensors; `what` names them in errors.

    With Gloo a call returns when the result is complete; with NCCL it returns when the work is queued on the current
    stream.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, what: str = "parameters", peers: Sequence[Peer] = ()
    ) -> None:
        self._group = group
        self._what = what
        self._peers = peers
        self.transport: str = dist.get_backend(group)
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._communicator = _nccl_backend(group) if self.transport == "nccl" else None

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        self._all_reduce(tensors, dist.ReduceOp.SUM)

    def start_sum_(self, tensor: Tensor) -> Started:
        """Start a sum that `wait` completes; all ranks start sums in the same order."""
        with self._guarded([tensor]):
            return Started(tensor, dist.all_reduce(tensor, group=self._group, async_op=True))

    def wait(self, sums: Sequence[Started]) -> None:
        """Wait for sums: with Gloo until they are complete, with NCCL until they are queued on the current stream."""
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
        """Check for a lost peer; NCCL does not report one, its kernel on the device just never ends."""
        if self._communicator is not None and self._communicator.get_error() != ErrorType.SUCCESS:
            raise self._lost(f"over {self.transport}", "its communicator failed")

    def finish(self, timeout_s: float) -> None:
        """Wait until all started collectives are complete on the device; with Gloo they already are."""
        if self._communicator is None:
            return
        event = torch.cuda.Event()
        event.record()
        await_event(event, self, late=lambda: self._late(timeout_s), timeout_s=timeout_s)

    def _all_reduce(self, tensors: Sequence[Tensor], operation: dist.ReduceOp.RedOpType) -> None:
        self._run(tensors, lambda tensor: dist.all_reduce(tensor, operation, group=self._group, async_op=True))

    def _run(self, tensors: Sequence[Tensor], start: Callable[[Tensor], dist.Work | None]) -> None:
        with self._guarded(tensors):
            # Start all before waiting for any, so that small tensors share one round trip.
            for started in [Started(tensor, start(tensor)) for tensor in tensors]:
                started.wait()

    @contextlib.contextmanager
    def _guarded(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        for tensor in tensors:
            # Gloo had races between host and device with CUDA tensors; the host path makes its own copies.
            assert tensor.is_cuda == (self.transport == "nccl"), f"{self.transport} was handed a {tensor.device} tensor"
        try:
            yield
        except RuntimeError as error:
            num_bytes = sum(tensor.nbytes for tensor in tensors)
            raise self._lost(f"({num_bytes:,} bytes over {self.transport})", _first_line(error)) from error

    def _lost(self, cargo: str, trouble: str) -> PeerLostError:
        lost = _suspect(trouble, self.rank, self.world_size, self._peers)
        who = "a peer" if lost is None or not self._peers else f"rank {lost} on {self._peers[lost]}"
        hint = "look for the first error among the other ranks"
        return PeerLostError(
            f"rank {self.rank} of {self.world_size} lost {who} while exchanging {self._what} {cargo}: {trouble}",
            hint=f"{hint}, and see that the network between the hosts works" if self._peers else hint,
            rank=lost,
        )

    def _late(self, timeout_s: float) -> WaitError:
        return WaitError(
            f"rank {self.rank} waited {timeout_s:g} s for {self._what} to be summed by all {self.world_size} ranks",
            hint="a rank may be stuck or far slower than the others: look at the rank logs",
            rank=_only_other(self.rank, self.world_size),
        )


class BlockingCollective(abc.ABC):
    """A collective for tensors in host memory whose sums are complete when the call returns.

    A user's own backend defines the three abstract methods. Each changes its tensors in place, and every rank must end
    up with the same bits.
    """

    def __init__(self, *, transport: str, rank: int, world_size: int) -> None:
        self.transport = transport
        self.rank = rank
        self.world_size = world_size

    @abc.abstractmethod
    def sum_(self, tensors: Sequence[Tensor]) -> None: ...

    @abc.abstractmethod
    def max_(self, tensors: Sequence[Tensor]) -> None: ...

    @abc.abstractmethod
    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None: ...

    def start_sum_(self, tensor: Tensor) -> Started:
        """Sum immediately: a background sum would use the same cores as the computation."""
        self.sum_([tensor])
        return Started(tensor, None)

    def wait(self, sums: Sequence[Started]) -> None:  # noqa: B027
        """Do nothing: the sums were complete when `start_sum_` returned."""

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        return gather_by_sum(self, values, device="cpu")

    def check_peers(self) -> None:  # noqa: B027
        """Do nothing: a rank that waits for a peer notices when the peer ends."""

    def finish(self, timeout_s: float) -> None:  # noqa: B027
        """Do nothing: no collective runs in the background."""


def gather_by_sum(collective: RankCollective, values: Sequence[int], *, device: str) -> list[list[int]]:
    """Gather the integers of every rank: each rank fills its own row of a table of zeros."""
    table = torch.zeros(collective.world_size, len(values), dtype=torch.int64, device=device)
    table[collective.rank] = torch.tensor(values, dtype=torch.int64)
    collective.sum_([table])
    rows: list[list[int]] = table.tolist()
    return rows


@torch.no_grad()
def meet(exchanges: Sequence[Exchanged]) -> None:
    """Sum the wires of exchanges in one process, in rank order, and give each exchange the sum.

    The result has the same bits as SharedMemoryCollective. It has the same bits as Gloo for two ranks only, since Gloo
    adds more ranks in another order.
    """
    ordered = sorted(exchanges, key=lambda exchange: exchange.rank)
    for wires in zip(*(exchange.wires for exchange in ordered), strict=True):
        _share(wires, torch.add)


@torch.no_grad()
def meet_pieces(exchanges: Sequence[Exchange]) -> list[Settled]:
    """Complete open averages in one process, piece by piece, with the bits of `meet`; counters take the maximum."""
    ordered = sorted(exchanges, key=lambda exchange: exchange.rank)
    for pieces in zip(*(exchange.pieces for exchange in ordered), strict=True):
        on = ordered[0].arena.device
        buffers = [torch.zeros(piece.numel, dtype=piece.dtype, device=on) for piece in pieces]
        for exchange, piece, buffer in zip(ordered, pieces, buffers, strict=True):
            exchange.pack(piece, buffer)
        form = pieces[0].form
        if form is None:
            _share(buffers, torch.add)
        else:
            total = torch.zeros(form.numel, device=on)
            add_packets(buffers, form, total)
            buffers = [total] * len(buffers)
        for exchange, piece, buffer in zip(ordered, pieces, buffers, strict=True):
            exchange.take_facts(piece, [buffer.to(exchange.device)])
            exchange.settle(piece, [buffer])
    _share([exchange.pack_norms() for exchange in ordered], torch.add)
    for maxima in zip(*(exchange.maxima for exchange in ordered), strict=True):
        _share(maxima, torch.maximum)
    for exchange in ordered:
        exchange.report()
    return [exchange.read() for exchange in exchanges]


def _share(tensors: Sequence[Tensor], combine: Callable[..., Tensor]) -> None:
    """Combine the tensors in order, and write the result into each."""
    first, *others = tensors
    for other in others:
        combine(first, other, out=first)
    for other in others:
        other.copy_(first)


def await_event(
    event: torch.cuda.Event, collective: Collective, *, late: Callable[[], WaitError], timeout_s: float
) -> None:
    """Poll the event: torch has no timeout for events, and with a lost peer it never completes."""
    started_s = time.monotonic()
    while not event.query():
        waited_s = time.monotonic() - started_s
        if waited_s > timeout_s:
            raise late()
        collective.check_peers()
        # Most sums end within a millisecond, which is about the shortest sleep of the system.
        if waited_s > _SPIN_S:
            time.sleep(_TURN_S)


def overdue(exchange: Exchange, *, number: int, timeout_s: float) -> WaitError:
    """The error when other ranks did not join the collective in time."""
    return WaitError(
        f"rank {exchange.rank} waited {timeout_s:g} s for average {number} "
        f"to be summed by all {exchange.world_size} ranks",
        hint="a rank may be stuck or far slower than the others: look at the rank logs",
        rank=_only_other(exchange.rank, exchange.world_size),
    )


def _nccl_backend(group: dist.ProcessGroup | None) -> Backend:
    own = dist.group.WORLD if group is None else group
    assert own is not None, "a group comes with its default"
    return own._get_backend(torch.device("cuda"))


def _suspect(trouble: str, rank: int, world_size: int, peers: Sequence[Peer]) -> int | None:
    """The lost rank, if there is only one other rank or Gloo's message contains its address."""
    named = [other for other, peer in enumerate(peers) if other != rank and f"[{peer.address}]" in trouble]
    return named[0] if len(named) == 1 else _only_other(rank, world_size)


def _only_other(rank: int, world_size: int) -> int | None:
    """The only other rank; None if there are several."""
    return 1 - rank if world_size == 2 else None


def _first_line(error: BaseException) -> str:
    """Gloo's message without the leading source location."""
    line = next(iter(str(error).splitlines()), type(error).__name__)
    return re.sub(r"^\[/[^\]]*\] ", "", line)
