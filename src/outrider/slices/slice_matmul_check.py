"""Checks matrix products on a slice: some half-precision kernels of cuBLAS give wrong results there.

With some numbers of multiprocessors, parts of a product are not written, without an error (docs/gpu.md). In that case
this module makes cuBLAS choose kernels for fewer multiprocessors. Called when a rank opens its device.
"""

from __future__ import annotations

import sys
from itertools import product

import torch
from torch import Tensor

from outrider.errors import DeviceError
from outrider.machine.devices import DeviceSpec

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


def mend_products(spec: DeviceSpec, *, rank: int) -> int | None:
    """Make products of this rank correct; returns the number of multiprocessors for their kernels, None for all."""
    if spec.share is None:
        return None
    device = torch.device(spec.torch_name)
    num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    if are_right(device):
        return None
    for count in range(num_multiprocessors - _STEP, _FEWEST - 1, -_STEP):
        _choose_for(count, of=num_multiprocessors)
        if are_right(device):
            print(
                f"outrider: on {spec} ({num_multiprocessors} multiprocessors) cuBLAS leaves parts of products in half "
                f"precision unwritten; rank {rank} uses its kernels for {count}",
                file=sys.stderr,
            )
            return count
    raise DeviceError(
        f"rank {rank} cannot use {spec}: on its {num_multiprocessors} multiprocessors cuBLAS multiplies matrices "
        f"wrongly in half precision",
        hint=f"take another share of the GPU, such as cuda:{spec.index}%25 or cuda:{spec.index}%50",
        rank=rank,
    )


def are_right(device: torch.device) -> bool:
    """Whether half-precision products are correct; does not advance the global random generators."""
    generator = torch.Generator(device).manual_seed(0)
    return all(_is_right(shape, transposed, generator) for shape, transposed in product(SHAPES, _TRANSPOSED))


def _is_right(shape: tuple[int, int, int], transposed: tuple[bool, bool], generator: torch.Generator) -> bool:
    rows, length, columns = shape
    left = _matrix(rows, length, transposed=transposed[0], generator=generator)
    right = _matrix(length, columns, transposed=transposed[1], generator=generator)
    expected = left.float() @ right.float()
    # Freed memory may still contain the correct product of the previous check.
    out = torch.full((rows, columns), torch.nan, dtype=left.dtype, device=left.device)
    _multiply(left, right, out)
    error = (out.float() - expected).abs().max() / expected.abs().max()
    return error.item() < _TOLERANCE


def _matrix(rows: int, columns: int, *, transposed: bool, generator: torch.Generator) -> Tensor:
    size = (columns, rows) if transposed else (rows, columns)
    made = torch.randn(size, generator=generator, device=generator.device).to(_half(generator.device))
    return made.t() if transposed else made


def _half(device: torch.device) -> torch.dtype:
    """One half-precision type to check: both were correct or wrong together in all tests; old cards have one only."""
    has_bf16 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if has_bf16 else torch.float16


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    torch.mm(left, right, out=out)


def _choose_for(count: int, *, of: int) -> None:
    """Set for all threads of this process, including those of the backward pass; a cuBLAS handle is per thread."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch._C._set_sm_carveout_experimental(of - count)
