"""Detects tensors outside of the arena that change after all: a codebook, a teacher without gradients, a queue.

Compares values, because in-place writes through `.data` and replayed CUDA graphs leave no other trace. Does not decide
what happens then. Called by the averages of a rank: after 1, 2, 4, 8, ... steps, and between two segments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from outrider.average.arena_layout import Kind, Tenant, plain_tensors
from outrider.errors import ConfigError

FULL_BYTES = 16 * 2**20
"""Buffers above this size are sampled after a step, and read completely between two segments."""
NUM_SAMPLED = 4096
_ROW = 256


@dataclass(frozen=True, slots=True)
class _RestingMark:
    """A hash of some or all values of a tensor."""

    sampled: int
    whole: int | None
    shape: tuple[int, ...]


class RestingWatch:
    """Compares tensors at rest with their values when the watch began.

    Buffers are read completely. Of a frozen parameter a few thousand evenly spread values are read, which is enough:
    code that changes one without a gradient, such as a moving average of other weights, changes it everywhere.
    """

    def __init__(self, tenants: Sequence[Tenant]) -> None:
        self._tenants = list(tenants)
        self._marks = self._read(is_thorough=True)

    def changed(self, *, is_thorough: bool) -> list[str]:
        """The names of changed tensors; waits for a GPU. If `is_thorough`, large buffers are read completely too."""
        if not self._tenants:
            return []
        now = self._read(is_thorough=is_thorough)
        return [
            tenant.name
            for tenant, before, later in zip(self._tenants, self._marks, now, strict=True)
            if _differs(before, later)
        ]

    @torch.no_grad()
    def _read(self, *, is_thorough: bool) -> list[_RestingMark]:
        hashes: list[Tensor] = []
        wholes: list[bool] = []
        for tenant in self._tenants:
            parts = list(plain_tensors(tenant.current()))
            is_whole = tenant.kind is not Kind.PARAMETER and (is_thorough or _num_bytes(parts) <= FULL_BYTES)
            wholes.append(is_whole)
            hashes.append(_combined(_hash(part, step=_step(part)) for part in parts))
            hashes.append(_combined(_hash(part, step=1) for part in parts) if is_whole else hashes[-1])
        # One copy to the host for all hashes.
        values = torch.stack(hashes).tolist() if hashes else []
        return [
            _RestingMark(values[2 * n], values[2 * n + 1] if is_whole else None, tuple(tenant.current().shape))
            for n, (tenant, is_whole) in enumerate(zip(self._tenants, wholes, strict=True))
        ]


COPIED_BYTES = 2**30


class RestingCopy:
    """A copy of the tensors at rest in host memory, used to undo trial steps.

    Beyond a gigabyte the largest are not copied, because frozen weights of that size are expected not to change.
    """

    def __init__(self, tenants: Sequence[Tenant]) -> None:
        self._tenants = {tenant.name: tenant for tenant in tenants}
        self._watch = RestingWatch(tenants)
        parts = {tenant.name: list(plain_tensors(tenant.current())) for tenant in tenants}
        sizes = {name: _num_bytes(own) for name, own in parts.items()}
        # The small ones first: buffers that a step changes lie among frozen weights of many gigabytes.
        ends = accumulate(sorted(sizes.values()))
        kept = [
            name for name, end in zip(sorted(sizes, key=sizes.__getitem__), ends, strict=True) if end <= COPIED_BYTES
        ]
        self._copies = {name: [part.to("cpu", copy=True) for part in parts[name]] for name in kept}

    @torch.no_grad()
    def put_back(self) -> None:
        for name in self._watch.changed(is_thorough=True):
            if name not in self._copies:
                raise ConfigError(
                    f"a trial step changed {name}, which requires no gradient, and there is no room for a copy of it",
                    hint='pass execution="eager" and a number as micro_batch, so that no steps are tried',
                )
            for part, kept in zip(plain_tensors(self._tenants[name].current()), self._copies[name], strict=True):
                part.copy_(kept)


def _differs(before: _RestingMark, later: _RestingMark) -> bool:
    # A table with a new shape was recomputed for longer inputs; ranks may differ in this, and it is not averaged.
    if before.shape != later.shape:
        return False
    if before.whole is not None and later.whole is not None and before.whole != later.whole:
        return True
    return before.sampled != later.sampled


def _num_bytes(parts: Sequence[Tensor]) -> int:
    return sum(part.nbytes for part in parts)


def _step(tensor: Tensor) -> int:
    return max(1, tensor.numel() // NUM_SAMPLED)


def _combined(hashes: Iterator[Tensor]) -> Tensor:
    total: Tensor | None = None
    for number, one in enumerate(hashes):
        total = one if total is None else total + one * (2 * number + 3)
    return torch.zeros((), dtype=torch.int64) if total is None else total


def content_hash(tensor: Tensor) -> int:
    """A hash of all values of a tensor; the same on every device for equal values and shapes."""
    with torch.no_grad():
        return int(_combined(_hash(part, step=1) for part in plain_tensors(tensor)))


def _hash(tensor: Tensor, *, step: int) -> Tensor:
    """Weighted sums of the bits by column and by row, so that the hash also changes if values are swapped."""
    values = _as_integers(tensor)[::step]
    num_rows = values.numel() // _ROW
    table, rest = values[: num_rows * _ROW].view(num_rows, _ROW), values[num_rows * _ROW :]
    return (
        _weighted(table.sum(0, dtype=torch.int64))
        + 7 * _weighted(table.sum(1, dtype=torch.int64))
        + 13 * _weighted(rest.to(torch.int64))
    )


def _weighted(values: Tensor) -> Tensor:
    weights = torch.arange(values.numel(), dtype=torch.int64, device=values.device).mul_(2).add_(1)
    return weights.mul_(values).sum()


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _as_integers(tensor: Tensor) -> Tensor:
    """The bits of a tensor as flat integers; an expanded dimension is read once."""
    plain = tensor.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    for dimension, (size, stride) in enumerate(zip(plain.shape, plain.stride(), strict=True)):
        if size > 1 and stride == 0:
            plain = plain.narrow(dimension, 0, 1)
    return plain.contiguous().view(-1).view(_INTEGERS[plain.element_size()])
