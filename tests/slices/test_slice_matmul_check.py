"""Products in half precision are looked at before a slice trains; what cuBLAS leaves unwritten shows, and is mended."""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from outrider.errors import DeviceError
from outrider.machine.devices import parse_devices
from outrider.slices import slice_matmul_check

CPU = torch.device("cpu")
(SLICE,) = parse_devices(["cuda:0%30"])
multiply = slice_matmul_check._multiply


@pytest.fixture(autouse=True)
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_matmul_check, "SHAPES", ((8, 16, 12), (5, 32, 3)))


def test_right_products_are_right() -> None:
    assert slice_matmul_check.are_right(CPU)


@pytest.mark.parametrize("part", [(slice(None), slice(None)), (slice(-1, None), slice(-1, None))])
def test_a_part_that_stays_unwritten_is_seen_in_one_product_of_many(
    monkeypatch: pytest.MonkeyPatch, part: tuple[slice, slice]
) -> None:
    calls = []

    def without_a_part(left: Tensor, right: Tensor, out: Tensor) -> None:
        before = out.clone()
        multiply(left, right, out)
        calls.append(tuple(out.shape))
        if len(calls) == 5:
            out[part] = before[part]

    monkeypatch.setattr(slice_matmul_check, "_multiply", without_a_part)
    assert not slice_matmul_check.are_right(CPU)
    assert calls == [(8, 12)] * 3 + [(5, 3)] * 2


def test_a_product_of_stale_memory_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_matmul_check, "_multiply", lambda left, right, out: out.fill_(0.5))
    assert not slice_matmul_check.are_right(CPU)


def test_looking_takes_no_random_numbers_from_the_run() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    slice_matmul_check.are_right(CPU)
    assert torch.equal(torch.rand(4), expected)


Card = Callable[[Collection[int]], list[int]]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """A slice of 38 multiprocessors whose products are right where cuBLAS chooses for some numbers of them."""

    def with_right(right_at: Collection[int]) -> list[int]:
        tried = [38]
        monkeypatch.setattr(slice_matmul_check, "are_right", lambda device: tried[-1] in right_at)
        monkeypatch.setattr(slice_matmul_check, "_choose_for", lambda count, *, of: tried.append(count))
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
        "rank 1 cannot use cuda:0%30: on its 38 multiprocessors cuBLAS multiplies matrices wrongly in half precision"
    )
    assert caught.value.hint == "take another share of the GPU, such as cuda:0%25 or cuda:0%50"


def test_whole_devices_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_matmul_check, "are_right", lambda device: pytest.fail("looked"))
    for spec in parse_devices(["cuda:0", "cpu"]):
        assert slice_matmul_check.mend_products(spec, rank=0) is None


def test_the_choice_holds_for_all_threads_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries: list[str] = []
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", libraries.append)
    try:
        slice_matmul_check._choose_for(32, of=38)
        assert torch._C._get_sm_carveout_experimental() == 6
    finally:
        torch._C._set_sm_carveout_experimental(None)
    assert libraries == ["cublaslt"]
