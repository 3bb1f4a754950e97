"""Checks matrix products on a slice: some half-precision kernels of cuBLAS give wrong results there.

With some numbers of multiprocessors, parts of a product are not written, without an error (docs/gpu.md). In that case
this module makes cuBLAS choose kernels for fewer multiprocessors. Called when a rank opens its device, and again with
the products of the step where `train()` tries it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from itertools import product

import torch
from torch import Tensor

from outrider.errors import DeviceError
from outrider.machine.devices import DeviceSpec
from outrider.replica.half_products import HalfProduct, Operand

# Rows, inner length and columns of layers, their gradients and their inputs' gradients. On an H200 with torch 2.11,
# these shapes detect every share for which any product was found wrong; the most sensitive shapes come first.
SHAPES = (
    (256, 64, 784),
    (8192, 128, 384),
    (8192, 128, 512),
    (65, 8192, 256),
    (128, 8192, 384),
    (1024, 1024, 1024),
    (8192, 512, 128),
    (256, 44, 784),
    (64, 784, 256),
    (256, 256, 256),
    (8192, 256, 65),
    (512, 8192, 128),
)
_TRANSPOSED = ((False, False), (True, False), (False, True))
# Half precision is accurate to about 0.004; the error of an unwritten element is as large as the element itself.
_TOLERANCE = 0.02
_STEP, _FEWEST = 2, 8
_EXPERIMENTAL = (
    r"torch\.backends\.cuda\.preferred_blas_library is an experimental feature",
    "Setting the SM carveout for matmuls is a temporary experimental mitigation",
)
"""The beginnings of two warnings of torch."""
_PIECE = 2**24
"""Elements that are compared at a time: a single-precision copy of a large result might not fit."""


def mend_products(spec: DeviceSpec, *, rank: int, of_step: Sequence[HalfProduct] = ()) -> int | None:
    """Make products of this rank correct; returns the number of multiprocessors for their kernels if that changes.

    Called without `of_step` before anything else is known, and then with the products of the user's step.
    """
    if spec.share is None:
        return None
    device = torch.device(spec.torch_name)
    wrong = wrong_product(device, of_step or usual_products(device))
    if wrong is None:
        return None
    num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    now = num_multiprocessors - (torch._C._get_sm_carveout_experimental() or 0)
    for count in range(now - _STEP, _FEWEST - 1, -_STEP):
        _choose_for(count, of=num_multiprocessors)
        if wrong_product(device, [*of_step, *usual_products(device)]) is None:
            print(
                f"outrider: on {spec} ({num_multiprocessors} multiprocessors) cuBLAS leaves parts of products in half "
                f"precision unwritten; rank {rank} uses its kernels for {count}",
                file=sys.stderr,
            )
            return count
    raise DeviceError(
        f"rank {rank} cannot use {spec}: on its {num_multiprocessors} multiprocessors cuBLAS multiplies matrices "
        f"wrongly in half precision ({wrong})",
        hint=f"take another share of the GPU, such as cuda:{spec.index}%25 or cuda:{spec.index}%50"
        + (', or precision="fp32"' if of_step else ""),
        rank=rank,
    )


def usual_products(device: torch.device) -> list[HalfProduct]:
    """Products of `SHAPES`, with each factor as it is and transposed."""
    return [
        HalfProduct(
            operation="mm",
            operands=(_layout(rows, length, transposed=left), _layout(length, columns, transposed=right)),
            dtype=_half(device),
        )
        for (rows, length, columns), (left, right) in product(SHAPES, _TRANSPOSED)
    ]


def _layout(rows: int, columns: int, *, transposed: bool) -> Operand:
    return Operand(shape=(rows, columns), stride=(1, rows) if transposed else (columns, 1))


def wrong_product(device: torch.device, products: Iterable[HalfProduct]) -> HalfProduct | None:
    """The first product that is not correct; does not advance the global random generators."""
    generator = torch.Generator(device).manual_seed(0)
    return next((one for one in products if not _is_right(one, generator)), None)


def _is_right(tried: HalfProduct, generator: torch.Generator) -> bool:
    operands = [operand.random(tried.dtype, generator) for operand in tried.operands]
    # Freed memory may still contain the correct product of the previous check.
    out = torch.full(tried.shape, torch.nan, dtype=tried.dtype, device=generator.device)
    _multiply(tried.operation, operands, out)
    errors, sizes = [], []
    rows = max(1, _PIECE // out[0].numel())
    for begin in range(0, len(out), rows):
        part = slice(begin, begin + rows)
        expected = _expected(operands, part)
        errors.append((out[part].float() - expected).abs().max())
        sizes.append(expected.abs().max())
    error = torch.stack(errors).max() / torch.stack(sizes).max()
    return error.item() < _TOLERANCE


def _expected(operands: Sequence[Tensor], part: slice) -> Tensor:
    """Some rows of the result in single precision, which is correct on slices; of a batched product some matrices."""
    *summands, left, right = operands
    total = left[part].float() @ (right if right.dim() == 2 else right[part]).float()
    for summand in summands:
        is_whole = summand.dim() == left.dim() and len(summand) == len(left)
        total += (summand[part] if is_whole else summand).float()
    return total


def _half(device: torch.device) -> torch.dtype:
    """One half-precision type to check: both were correct or wrong together in all tests; old cards have one only."""
    has_bf16 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if has_bf16 else torch.float16


def _multiply(operation: str, operands: Sequence[Tensor], out: Tensor) -> None:
    getattr(torch, operation)(*operands, out=out)


def _choose_for(count: int, *, of: int) -> None:
    """Set for all threads of this process, including those of the backward pass; a cuBLAS handle is per thread."""
    with warnings.catch_warnings():
        # torch calls both settings experimental. The user did not make them, and `mend_products` prints what they do.
        for message in _EXPERIMENTAL:
            warnings.filterwarnings("ignore", message=message)
        torch.backends.cuda.preferred_blas_library("cublaslt")
        _carve_out(of - count)


def _carve_out(num_multiprocessors: int) -> None:
    """Leave these multiprocessors out, with torch's warning as one of Python, which a filter can ignore.

    Called directly, the binding prints its warning on stderr. Inside of an operator torch collects warnings for Python.
    """

    def carve_out(value: float) -> float:
        torch._C._set_sm_carveout_experimental(num_multiprocessors)
        return value

    torch.zeros(1, device="cpu").apply_(carve_out)
