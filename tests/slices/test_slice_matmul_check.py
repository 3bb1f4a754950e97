"""Products in half precision are looked at before a slice trains; what cuBLAS leaves unwritten shows, and is mended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from outrider.errors import DeviceError
from outrider.machine.devices import parse_devices
from outrider.replica.half_products import HalfProduct, Operand
from outrider.slices import slice_matmul_check

CPU = torch.device("cpu")
(SLICE,) = parse_devices(["cuda:0%30"])
multiply = slice_matmul_check._multiply
OF_STEP = HalfProduct(
    operation="addmm",
    operands=tuple(Operand.of(torch.empty(shape, dtype=torch.float16)) for shape in [(256,), (64, 784), (784, 256)]),
    dtype=torch.float16,
)


@pytest.fixture(autouse=True)
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_matmul_check, "SHAPES", ((8, 16, 12), (5, 32, 3)))


def wrong_usual() -> HalfProduct | None:
    return slice_matmul_check.wrong_product(CPU, slice_matmul_check.usual_products(CPU))


def test_right_products_are_right() -> None:
    assert wrong_usual() is None


@pytest.mark.parametrize("part", [(slice(None), slice(None)), (slice(-1, None), slice(-1, None))])
def test_a_part_that_stays_unwritten_is_seen_in_one_product_of_many(
    monkeypatch: pytest.MonkeyPatch, part: tuple[slice, slice]
) -> None:
    calls = []

    def without_a_part(operation: str, operands: Sequence[Tensor], out: Tensor) -> None:
        before = out.clone()
        multiply(operation, operands, out)
        calls.append(tuple(out.shape))
        if len(calls) == 5:
            out[part] = before[part]

    monkeypatch.setattr(slice_matmul_check, "_multiply", without_a_part)
    assert wrong_usual() is not None
    assert calls == [(8, 12)] * 3 + [(5, 3)] * 2


def test_a_product_of_stale_memory_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_matmul_check, "_multiply", lambda operation, operands, out: out.fill_(0.5))
    assert wrong_usual() is not None


def test_looking_takes_no_random_numbers_from_the_run() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    wrong_usual()
    assert torch.equal(torch.rand(4), expected)


def test_large_results_are_compared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_the_end(operation: str, operands: Sequence[Tensor], out: Tensor) -> None:
        multiply(operation, operands, out)
        out[-1, -1] = torch.nan

    monkeypatch.setattr(slice_matmul_check, "_PIECE", 24)
    assert wrong_usual() is None
    monkeypatch.setattr(slice_matmul_check, "_multiply", without_the_end)
    assert wrong_usual() is not None


@pytest.mark.parametrize(
    ("operation", "shapes"),
    [
        ("mm", [(6, 8), (8, 5)]),
        ("addmm", [(5,), (6, 8), (8, 5)]),
        ("addmm", [(6, 5), (6, 8), (8, 5)]),
        ("bmm", [(3, 6, 8), (3, 8, 5)]),
        ("baddbmm", [(3, 6, 5), (3, 6, 8), (3, 8, 5)]),
        ("baddbmm", [(1, 6, 5), (3, 6, 8), (3, 8, 5)]),
    ],
)
@pytest.mark.parametrize("piece", [7, 2**24])
def test_every_kind_of_product_is_checked_as_torch_computes_it(
    monkeypatch: pytest.MonkeyPatch, operation: str, shapes: list[tuple[int, ...]], piece: int
) -> None:
    operands = tuple(Operand.of(torch.empty(shape, dtype=torch.bfloat16)) for shape in shapes)
    tried = HalfProduct(operation=operation, operands=operands, dtype=torch.bfloat16)
    monkeypatch.setattr(slice_matmul_check, "_PIECE", piece)
    assert slice_matmul_check.wrong_product(CPU, [tried]) is None

    def without_a_row(operation: str, operands: Sequence[Tensor], out: Tensor) -> None:
        multiply(operation, operands, out)
        out[-1] = 0

    monkeypatch.setattr(slice_matmul_check, "_multiply", without_a_row)
    assert slice_matmul_check.wrong_product(CPU, [tried]) is tried


Card = Callable[..., list[int]]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """A slice of 38 multiprocessors whose products are right where cuBLAS chooses for some numbers of them."""

    def with_right(right_at: Collection[int], *, looked_at: list[int] | None = None) -> list[int]:
        tried = [38]
        looked_at = [] if looked_at is None else looked_at

        def wrong_one(device: torch.device, products: Iterable[HalfProduct]) -> HalfProduct | None:
            looked_at.append(len(list(products)))
            return None if tried[-1] in right_at else next(iter(products))

        monkeypatch.setattr(slice_matmul_check, "wrong_product", wrong_one)
        monkeypatch.setattr(slice_matmul_check, "_choose_for", lambda count, *, of: tried.append(count))
        monkeypatch.setattr(slice_matmul_check, "_half", lambda device: torch.bfloat16)
        return tried

    properties = SimpleNamespace(multi_processor_count=38)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return with_right


def test_a_slice_with_right_products_is_left_alone(card: Card, capsys: pytest.CaptureFixture[str]) -> None:
    tried = card({38, 32})
    assert slice_matmul_check.mend_products(SLICE, rank=0) is None
    assert tried == [38]
    assert capsys.readouterr().err == ""


def test_the_most_multiprocessors_with_right_products_are_taken(card: Card, capsys: pytest.CaptureFixture[str]) -> None:
    tried = card({32, 18})
    assert slice_matmul_check.mend_products(SLICE, rank=1) == 32
    assert tried == [38, 36, 34, 32]
    assert capsys.readouterr().err == (
        "outrider: on cuda:0%30 (38 multiprocessors) cuBLAS leaves parts of products in half precision unwritten; "
        "rank 1 uses its kernels for 32\n"
    )


def test_a_slice_that_nothing_mends_is_refused(card: Card) -> None:
    tried = card(())
    with pytest.raises(DeviceError) as caught:
        slice_matmul_check.mend_products(SLICE, rank=1)
    assert tried[-1] == 8
    assert caught.value.message == (
        "rank 1 cannot use cuda:0%30: on its 38 multiprocessors cuBLAS multiplies matrices wrongly in half precision "
        "(mm of 8 × 16 and 16 × 12 in bfloat16)"
    )
    assert caught.value.hint == "take another share of the GPU, such as cuda:0%25 or cuda:0%50"


def test_products_of_the_step_are_mended_together_with_the_usual_ones(card: Card) -> None:
    looked_at: list[int] = []
    tried = card({32}, looked_at=looked_at)
    assert slice_matmul_check.mend_products(SLICE, rank=0, of_step=[OF_STEP]) == 32
    assert tried == [38, 36, 34, 32]
    assert looked_at == [1, 7, 7, 7]


def test_the_search_goes_on_below_the_number_that_is_used_already(card: Card, carved_out: None) -> None:
    tried = card({26})
    assert slice_matmul_check.mend_products(SLICE, rank=0, of_step=[OF_STEP]) == 26
    assert tried == [38, 30, 28, 26]


def test_a_step_that_nothing_mends_is_refused_with_its_product(card: Card) -> None:
    card(())
    with pytest.raises(DeviceError) as caught:
        slice_matmul_check.mend_products(SLICE, rank=1, of_step=[OF_STEP])
    assert "(addmm of 64 × 784 and 784 × 256 in float16)" in caught.value.message
    assert (caught.value.hint or "").endswith('or precision="fp32"')


def test_whole_devices_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_matmul_check, "wrong_product", lambda *_: pytest.fail("looked"))
    for spec in parse_devices(["cuda:0", "cpu"]):
        assert slice_matmul_check.mend_products(spec, rank=0) is None


@pytest.fixture
def carved_out() -> Iterator[None]:
    """Kernels for 32 of the 38 multiprocessors are used."""
    torch._C._set_sm_carveout_experimental(6)
    yield
    torch._C._set_sm_carveout_experimental(None)


CHOICE = """
import warnings
import torch
from outrider.slices import slice_matmul_check

def preferred_blas_library(name):
    warnings.warn("torch.backends.cuda.preferred_blas_library is an experimental feature. If you see any error ...")

torch.backends.cuda.preferred_blas_library = preferred_blas_library
slice_matmul_check._choose_for(32, of=38)
assert torch._C._get_sm_carveout_experimental() == 6
warnings.warn("another one")
"""


def test_the_choice_prints_no_warning_of_torch() -> None:
    """In a process of its own, because torch warns once per process."""
    told = subprocess.run([sys.executable, "-c", CHOICE], capture_output=True, text=True, check=True)
    assert "experimental" not in told.stderr
    assert "another one" in told.stderr


def test_the_choice_holds_for_all_threads_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries: list[str] = []
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", libraries.append)
    try:
        slice_matmul_check._choose_for(32, of=38)
        assert torch._C._get_sm_carveout_experimental() == 6
    finally:
        torch._C._set_sm_carveout_experimental(None)
    assert libraries == ["cublaslt"]
