"""Records the matrix products in half precision that a step computes: operation, shapes, layouts.

Decides which operations count as such products: those that cuBLAS computes. A rank on a slice of a GPU checks them
before training (`slices`). Called at set-up, during a trial step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_HALF = (torch.bfloat16, torch.float16)
_ALIGNMENT = 16
"""In bytes; kernels that read this much at a time are chosen only for aligned addresses."""
_OPERATIONS = {
    torch.ops.aten.mm.default: "mm",
    torch.ops.aten.addmm.default: "addmm",
    torch.ops.aten.bmm.default: "bmm",
    torch.ops.aten.baddbmm.default: "baddbmm",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Operand:
    """The layout of a factor or summand; `skipped` elements lie between an aligned address and its first one."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    skipped: int = 0

    @classmethod
    def of(cls, tensor: Tensor) -> Operand:
        skipped = tensor.data_ptr() % _ALIGNMENT // tensor.element_size()
        return cls(shape=tuple(tensor.shape), stride=tuple(tensor.stride()), skipped=skipped)

    def random(self, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        """A tensor of this layout with normal values; elements that share memory have one value."""
        span = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        values = torch.randn(self.skipped + span, generator=generator, device=generator.device).to(dtype)
        return values.as_strided(self.shape, self.stride, self.skipped)


@dataclass(frozen=True, kw_only=True, slots=True)
class HalfProduct:
    """A product as torch names it (`mm`, `addmm`, `bmm`, `baddbmm`); the last two operands are the factors."""

    operation: str
    operands: tuple[Operand, ...]
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        left, right = self.operands[-2:]
        return (*left.shape[:-1], right.shape[-1])

    def __str__(self) -> str:
        left, right = (" × ".join(map(str, operand.shape)) for operand in self.operands[-2:])
        return f"{self.operation} of {left} and {right} in {str(self.dtype).removeprefix('torch.')}"


class ProductRecorder(TorchDispatchMode):
    """Context manager that collects the products of forward and backward passes within it, each once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._products: dict[HalfProduct, None] = {}

    @property
    def products(self) -> tuple[HalfProduct, ...]:
        """The products, in the order of their first occurrence."""
        return tuple(self._products)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        operation = _OPERATIONS.get(func)
        if operation is not None and args[-1].dtype in _HALF and args[-1].numel():
            operands = tuple(Operand.of(argument) for argument in args)
            self._products[HalfProduct(operation=operation, operands=operands, dtype=args[-1].dtype)] = None
        return func(*args, **(kwargs or {}))
