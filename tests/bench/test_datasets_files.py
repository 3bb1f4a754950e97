"""CIFAR-10 and Tiny Shakespeare from their files, and the stand-ins of the same shapes."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from outrider.bench.datasets import cifar10, shakespeare
from outrider.bench.datasets.dataset_files import Part, find_data, md5
from outrider.bench.datasets.source import DataSource, locate
from outrider.bench.models.image_models import NUM_CLASSES, accuracy, cross_entropy_step
from outrider.errors import DataError

DrawPart = Callable[[Part, int, int], TensorDataset]
BESIDE = Path(__file__).resolve().parents[3] / "shared" / "data"
PLACE = os.environ.get("OUTRIDER_DATA") or BESIDE


def batch_file(number: int, num_records: int = 3) -> bytes:
    """Records whose label and pixels tell file and place."""
    records = [bytes([place]) + bytes([10 * number + place]) * 3_072 for place in range(num_records)]
    return b"".join(records)


@pytest.fixture
def small_cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six files of three images, taken for the official ones."""
    contents = {name: batch_file(number) for number, name in enumerate(cifar10.MD5_BY_FILE)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(cifar10, "MD5_BY_FILE", {name: md5(content) for name, content in contents.items()})
    return tmp_path


@pytest.fixture
def archive(small_cifar: Path) -> Path:
    """The same six in an archive, and no longer beside it."""
    path = small_cifar / cifar10.ARCHIVE
    with tarfile.open(path, "w:gz") as target:
        for name in cifar10.MD5_BY_FILE:
            target.add(small_cifar / name, arcname=f"{cifar10.FOLDER}/{name}")
            (small_cifar / name).unlink()
    return path


# CIFAR-10.


def test_cifar_is_read_from_its_binary_files(small_cifar: Path) -> None:
    images, labels = cifar10.read_part(small_cifar, "train").tensors
    located = locate("cifar10", DataSource(folder=small_cifar))
    assert (located.title, located.is_stand_in) == ("CIFAR-10", False)
    assert (len(images), len(cifar10.read_part(small_cifar, "test"))) == (15, 3)
    assert (images.shape, images.dtype, labels.dtype) == ((15, 3, 32, 32), torch.uint8, torch.int64)
    assert labels[:4].tolist() == [0, 1, 2, 0]
    assert images[:, 0, 0, 0].tolist() == [10 * file + place for file in range(5) for place in range(3)]


def test_a_record_is_its_label_and_three_planes() -> None:
    content = bytes([7]) + bytes([1]) * 1_024 + bytes([2]) * 1_024 + bytes([3]) * 1_024
    images, labels = cifar10.parse_batch(content)
    assert labels.tolist() == [7]
    assert [channel.unique().tolist() for channel in images[0]] == [[1], [2], [3]]


def test_cifar_is_read_from_its_archive(archive: Path) -> None:
    images, labels = cifar10.read_part(archive.parent, "test").tensors
    assert images[:, 2, 31, 31].tolist() == [50, 51, 52]
    assert labels.tolist() == [0, 1, 2]


def test_an_unpacked_archive_is_the_six_files(archive: Path) -> None:
    cifar10.unpack(archive.parent)
    archive.unlink()
    assert len(cifar10.read_part(archive.parent, "train")) == 15


def test_a_cut_off_archive_is_refused_with_both_hashes(archive: Path) -> None:
    archive.write_bytes(archive.read_bytes()[:200])
    with pytest.raises(DataError) as caught:
        cifar10.read_part(archive.parent, "train")
    assert str(caught.value) == (
        f"{archive} is not the official file: expected MD5 {cifar10.ARCHIVE_MD5}, "
        f"found {md5(archive.read_bytes())}\nhint: the download may be cut short; fetch the file again"
    )


def test_an_archive_without_one_of_the_files_is_refused(archive: Path) -> None:
    with tarfile.open(archive, "w:gz") as target:
        target.addfile(tarfile.TarInfo(f"{cifar10.FOLDER}/readme.html"), io.BytesIO())
    with pytest.raises(DataError, match=f"expected MD5 {cifar10.ARCHIVE_MD5}, found "):
        cifar10.read_part(archive.parent, "train")


def test_a_changed_file_in_an_archive_is_named(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = dict(cifar10.MD5_BY_FILE) | {"test_batch.bin": "0" * 32}
    monkeypatch.setattr(cifar10, "MD5_BY_FILE", expected)
    with pytest.raises(DataError) as caught:
        cifar10.read_part(archive.parent, "test")
    assert caught.value.message == (
        f"{archive}: test_batch.bin is not the official file: expected MD5 {'0' * 32}, found {md5(batch_file(5))}"
    )


def test_a_truncated_batch_is_refused_with_both_hashes(small_cifar: Path) -> None:
    path = small_cifar / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError) as caught:
        cifar10.read_part(small_cifar, "train")
    assert caught.value.message == (
        f"{path} is not the official file: expected MD5 {cifar10.MD5_BY_FILE['data_batch_3.bin']}, "
        f"found {md5(path.read_bytes())}"
    )


def test_a_missing_batch_is_named_with_its_folder(small_cifar: Path) -> None:
    (small_cifar / "data_batch_4.bin").unlink()
    with pytest.raises(DataError) as caught:
        cifar10.read_part(small_cifar, "train")
    assert str(caught.value) == (
        f"data_batch_4.bin is missing in {small_cifar}\n"
        "hint: name the folder with the six .bin files of CIFAR-10's binary version, or with cifar-10-binary.tar.gz"
    )


@pytest.mark.skipif(
    find_data("cifar10", PLACE) is None, reason="CIFAR-10 is not here; set OUTRIDER_DATA to the folder with its files"
)
def test_real_cifar_is_read_whole() -> None:
    folder = find_data("cifar10", PLACE) or Path()
    images, labels = cifar10.read_part(folder, "train").tensors
    assert (len(images), len(cifar10.read_part(folder, "test"))) == (50_000, 10_000)
    assert torch.bincount(labels).tolist() == [5_000] * 10
    # The means that normalisation uses.
    means = [channel.float().mean().item() / 255 for channel in images.unbind(1)]
    assert means == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)


# Tiny Shakespeare.


def test_there_are_65_symbols_in_order_of_their_codes() -> None:
    assert len(shakespeare.SYMBOLS) == 65
    assert sorted(shakespeare.SYMBOLS) == list(shakespeare.SYMBOLS)


def test_text_becomes_the_places_of_its_symbols() -> None:
    assert shakespeare.encode("\n Az").tolist() == [0, 1, 13, 64]


def test_each_window_begins_with_the_last_symbol_of_the_one_before() -> None:
    windows = shakespeare.windows(torch.arange(2 * 128 + 1) % 65)
    assert windows.shape == (2, 129)
    assert windows[0, -1] == windows[1, 0]


def test_symbols_that_fill_no_window_are_left_out() -> None:
    assert len(shakespeare.windows(torch.zeros(3 * 128))) == 2


def test_changed_text_is_refused_with_both_hashes(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("To be")
    with pytest.raises(DataError) as caught:
        shakespeare.read_part(tmp_path, "train")
    assert caught.value.message == (
        f"{tmp_path / 'input.txt'} is not the official file: "
        f"expected MD5 6fb458f1232090904fb40fe944165e91, found {md5(b'To be')}"
    )


def test_missing_text_is_named_with_its_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        shakespeare.read_part(tmp_path, "train")
    assert str(caught.value) == (
        f"input.txt is missing in {tmp_path}\nhint: name the folder with Tiny Shakespeare's input.txt"
    )


@pytest.mark.skipif(
    find_data("shakespeare", PLACE) is None,
    reason="Tiny Shakespeare is not here; set OUTRIDER_DATA to the folder with its input.txt",
)
def test_real_shakespeare_is_read_whole() -> None:
    folder = find_data("shakespeare", PLACE) or Path()
    (windows,) = shakespeare.read_part(folder, "train").tensors
    located = locate("shakespeare", DataSource(folder=folder))
    assert (located.title, located.is_stand_in) == ("Tiny Shakespeare", False)
    num_test = len(shakespeare.read_part(folder, "test"))
    assert (windows.shape, num_test, windows.dtype) == ((7_842, 129), 871, torch.uint8)
    assert windows.unique().tolist() == list(range(65))
    assert "".join(shakespeare.SYMBOLS[place] for place in windows[0, :14]) == "First Citizen:"


# The stand-ins.


@pytest.mark.parametrize("draw", [cifar10.draw_part, shakespeare.draw_part])
def test_stand_ins_are_the_same_for_the_same_seed_and_differ_otherwise(draw: DrawPart) -> None:
    first, again, other = draw("train", 20, 0), draw("train", 20, 0), draw("train", 20, 1)
    assert torch.equal(first.tensors[0], again.tensors[0])
    assert not torch.equal(first.tensors[0], other.tensors[0])


@pytest.mark.parametrize("draw", [cifar10.draw_part, shakespeare.draw_part])
def test_training_and_test_stand_ins_differ(draw: DrawPart) -> None:
    assert not torch.equal(draw("train", 20, 0).tensors[0], draw("test", 20, 0).tensors[0])


@pytest.mark.parametrize("draw", [cifar10.draw_part, shakespeare.draw_part])
def test_stand_ins_leave_the_random_generator_alone(draw: DrawPart) -> None:
    before = torch.get_rng_state()
    draw("train", 5, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_shapes_are_colour_images_of_ten_classes_as_bytes() -> None:
    images, labels = cifar10.draw_part("train", 300).tensors
    assert (images.shape, images.dtype, labels.dtype) == ((300, 3, 32, 32), torch.uint8, torch.int64)
    assert labels.unique().tolist() == list(range(10))
    assert images.float().mean((0, 2, 3)).tolist() == pytest.approx([127.5] * 3, abs=15)


def test_colours_do_not_give_the_class_of_a_shape_away() -> None:
    # All that a linear model can see: it stays near chance, one in ten.
    train, test = cifar10.draw_part("train", 1_500), cifar10.draw_part("test", 500)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3_072, NUM_CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for rows in torch.arange(1_500).split(50):
        optimizer.zero_grad()
        cross_entropy_step(model, (train.tensors[0][rows].float() / 255, train.tensors[1][rows])).backward()
        optimizer.step()
    assert accuracy(model, (test.tensors[0].float() / 255, test.tensors[1])).item() < 0.3


def test_verses_are_windows_of_all_65_symbols() -> None:
    (windows,) = shakespeare.draw_part("train", 1_800).tensors
    assert (windows.shape, windows.dtype) == ((1_800, 129), torch.uint8)
    assert windows.unique().tolist() == list(range(65))


def test_training_and_test_verses_are_in_the_same_language() -> None:
    def words(part: Part) -> set[str]:
        (windows,) = shakespeare.draw_part(part, 200).tensors
        text = "".join(shakespeare.SYMBOLS[place] for place in windows[:, :-1].flatten())
        return {word for word in text.split() if word.isalpha() and word.islower() and len(word) > 3}

    train, test = words("train"), words("test")
    assert len(train & test) > 0.8 * len(test)
