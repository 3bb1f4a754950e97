"""Decides the place of a tensor inside a flat tensor: offset, strides, alignment.

Does not decide which tensors belong together, and copies nothing. Called by Arena, OptimizerArena and GradientExchange.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# The alignment of torch's own CPU allocations; enough for vector loads and for cuDNN on CUDA.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlace:
    """The place of one tensor in the flat tensor of its dtype; `offset` and `numel` count real elements."""

    dtype: torch.dtype
    offset: int
    numel: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    is_complex: bool

    @property
    def stop(self) -> int:
        return self.offset + self.numel

    def view(self, flat: Tensor) -> Tensor:
        """The tensor of this place, as a view of `flat`."""
        span = flat.narrow(0, self.offset, self.numel)
        if self.is_complex:
            span = torch.view_as_complex(span.view(-1, 2))
        return span.as_strided(self.size, self.stride)


class LayoutPlanner:
    """Allocates places, with one end position per dtype."""

    def __init__(self) -> None:
        self.ends: dict[torch.dtype, int] = {}

    def place(self, tensor: Tensor, *, alignment_bytes: int = ALIGNMENT_BYTES) -> TensorPlace:
        dtype = real_dtype(tensor.dtype)
        numel = tensor.numel() * (2 if tensor.is_complex() else 1)
        step = max(1, alignment_bytes // dtype.itemsize)
        offset = -(-self.ends.get(dtype, 0) // step) * step
        self.ends[dtype] = offset + numel
        return TensorPlace(
            dtype=dtype,
            offset=offset,
            numel=numel,
            size=tuple(tensor.shape),
            stride=tensor.stride() if is_dense(tensor) else contiguous_stride(tensor.shape),
            is_complex=tensor.is_complex(),
        )

    def align(self) -> None:
        """Align the next place of every dtype."""
        for dtype, end in self.ends.items():
            step = max(1, ALIGNMENT_BYTES // dtype.itemsize)
            self.ends[dtype] = -(-end // step) * step


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the real and imaginary parts; the dtype itself if it is real."""
    return dtype.to_real() if dtype.is_complex else dtype


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one memory range without gaps or overlap, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return True
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def contiguous_stride(size: torch.Size) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for length in reversed(size):
        strides.append(step)
        step *= max(1, length)
    return tuple(reversed(strides))
