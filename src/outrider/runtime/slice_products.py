"""Sees to it that a slice multiplies matrices rightly: some of cuBLAS's kernels for half precision do not.

On some numbers of multiprocessors parts of a product stay unwritten, and nothing tells (docs/gpu.md). Where that is
so, has cuBLAS choose kernels for fewer multiprocessors, and looks again. Called when a rank takes its device.
"""

from __future__ import annotations

import sys
from itertools import product

import torch
from torch import Tensor

from outrider.errors import DeviceError
from outrider.machine.devices import DeviceSpec

# Rows, inner length and columns of layers, their gradients and their inputs' gradients. On an H200 with torch 2.11
# every share of which any product was found wrong has wrong ones among these; those that tell most shares come first.
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
# Half precision is right to about 0.004; what was not written is off by as much as a product is large, or more.
_TOLERANCE = 0.02
_STEP, _FEWEST = 2, 8


def mend_products(spec: DeviceSpec, *, rank: int) -> int | None:
    """Leave the rank with right products; returns for how many multiprocessors they are made, None for all of them."""
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
    """Whether products in half precision are what they should be; the random numbers of others stay as they are."""
    generator = torch.Generator(device).manual_seed(0)
    return all(_is_right(shape, transposed, generator) for shape, transposed in product(SHAPES, _TRANSPOSED))


def _is_right(shape: tuple[int, int, int], transposed: tuple[bool, bool], generator: torch.Generator) -> bool:
    rows, length, columns = shape
    left = _matrix(rows, length, transposed=transposed[0], generator=generator)
    right = _matrix(length, columns, transposed=transposed[1], generator=generator)
    expected = left.float() @ right.float()
    # Memory that was freed may hold the very product of the last look.
    out = torch.full((rows, columns), torch.nan, dtype=left.dtype, device=left.device)
    _multiply(left, right, out)
    error = (out.float() - expected).abs().max() / expected.abs().max()
    return error.item() < _TOLERANCE


def _matrix(rows: int, columns: int, *, transposed: bool, generator: torch.Generator) -> Tensor:
    size = (columns, rows) if transposed else (rows, columns)
    made = torch.randn(size, generator=generator, device=generator.device).to(_half(generator.device))
    return made.t() if transposed else made


def _half(device: torch.device) -> torch.dtype:
    """Both kinds were right or wrong together wherever they were looked at; old cards have one only."""
    has_bf16 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if has_bf16 else torch.float16


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    torch.mm(left, right, out=out)


def _choose_for(count: int, *, of: int) -> None:
    """For all threads of this process, those of the backward pass too: a cuBLAS handle would bind its own thread."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch._C._set_sm_carveout_experimental(of - count)
