"""The stand-in, MNIST and where its files are looked for."""

from __future__ import annotations

import gzip
import os
import struct
import sys
from pathlib import Path

import pytest
import torch

from outrider.bench.datasets.dataset_files import DataPair, cache_directory, find_data
from outrider.bench.datasets.mnist import glyphs, parse_idx, read_part
from outrider.bench.datasets.source import DataSource, locate
from outrider.bench.models.image_models import accuracy, cross_entropy_step, logistic
from outrider.data.order import shuffled
from outrider.errors import ConfigError, DataError

MARKER = "train-images-idx3-ubyte.gz"


def _real_mnist() -> Path | None:
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    return find_data("mnist", os.environ.get("OUTRIDER_DATA") or beside)


needs_mnist = pytest.mark.skipif(
    _real_mnist() is None, reason="MNIST is not here; set OUTRIDER_DATA to the folder with its four files"
)


@pytest.fixture(scope="module")
def pair() -> DataPair:
    return glyphs(num_train=3_000, num_test=500)


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without data: no variable, an empty home."""
    monkeypatch.delenv("OUTRIDER_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    return tmp_path


def _put_marker(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / MARKER).touch()
    return folder


# The stand-in.


def test_the_stand_in_says_what_it_is(pair: DataPair) -> None:
    assert pair.name == "glyphs (stand-in)"
    assert pair.is_stand_in


def test_glyphs_are_grey_images_of_ten_classes(pair: DataPair) -> None:
    images, labels = pair.train.tensors
    assert images.shape == (3_000, 1, 28, 28)
    assert images.dtype == torch.float32
    assert (images.min().item(), images.max().item()) == (0.0, 1.0)
    assert labels.dtype == torch.int64
    assert labels.unique().tolist() == list(range(10))


def test_glyphs_are_the_same_for_the_same_seed(pair: DataPair) -> None:
    again = glyphs(num_train=3_000, num_test=500)
    assert torch.equal(again.train.tensors[0], pair.train.tensors[0])
    assert torch.equal(again.test.tensors[1], pair.test.tensors[1])


def test_glyphs_differ_between_seeds() -> None:
    first, second = glyphs(10, 10, seed=0), glyphs(10, 10, seed=1)
    assert not torch.equal(first.train.tensors[0], second.train.tensors[0])


def test_training_and_test_glyphs_differ() -> None:
    same_size = glyphs(10, 10)
    assert not torch.equal(same_size.train.tensors[0], same_size.test.tensors[0])


def test_glyphs_leave_the_random_generator_alone() -> None:
    before = torch.get_rng_state()
    glyphs(10, 10)
    assert torch.equal(torch.get_rng_state(), before)


def test_glyphs_can_be_learned_but_not_at_a_glance(pair: DataPair) -> None:
    torch.manual_seed(0)
    model = logistic()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    images, labels = pair.train.tensors
    for rows in shuffled(len(labels), seed=0, epoch=0).split(32):
        optimizer.zero_grad()
        cross_entropy_step(model, (images[rows], labels[rows])).backward()
        optimizer.step()
    assert 0.35 < accuracy(model, pair.test.tensors).item() < 0.75


# MNIST.


@needs_mnist
def test_mnist_is_read_whole() -> None:
    folder = _real_mnist() or Path()
    train, test = read_part(folder, "train"), read_part(folder, "test")
    assert (len(train), len(test)) == (60_000, 10_000)
    assert not locate("mnist", DataSource(folder=folder)).is_stand_in
    assert train.tensors[0].shape == (60_000, 1, 28, 28)
    assert test.tensors[1][:5].tolist() == [7, 2, 1, 0, 4]
    # The mean that every MNIST tutorial normalises with.
    assert train.tensors[0].mean().item() == pytest.approx(0.1307, abs=1e-4)


@needs_mnist
def test_uncompressed_files_give_the_same_images(tmp_path: Path) -> None:
    source = _real_mnist() or Path()
    for compressed in sorted(source.glob("*-ubyte.gz")):
        (tmp_path / compressed.stem).write_bytes(gzip.decompress(compressed.read_bytes()))
    assert torch.equal(read_part(tmp_path, "test").tensors[0], read_part(source, "test").tensors[0])


def test_an_idx_file_becomes_a_tensor() -> None:
    content = struct.pack(">HBBII", 0, 8, 2, 2, 3) + bytes(range(6))
    assert parse_idx(content).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_changed_file_is_refused_with_both_hashes(tmp_path: Path) -> None:
    (tmp_path / MARKER).write_bytes(b"cut short")
    with pytest.raises(DataError) as caught:
        read_part(tmp_path, "train")
    assert str(caught.value) == (
        f"{tmp_path / MARKER} is not the official file: "
        "expected MD5 f68b3c2dcbeaaa9fbdd348bbdeb94873, found c1a31ae98fcef3c67493a99ee1901852\n"
        "hint: the download may be cut short; fetch the file again"
    )


def test_a_missing_file_is_named_with_its_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_part(tmp_path, "train")
    assert str(caught.value) == (
        f"train-images-idx3-ubyte.gz is missing in {tmp_path}\n"
        "hint: name the folder with the four official IDX files of MNIST, compressed or not"
    )


# Where files are looked for.


def test_data_is_found_in_the_folder_named(nowhere: Path) -> None:
    folder = _put_marker(nowhere / "digits")
    assert find_data("mnist", folder) == folder


def test_data_is_found_below_the_folder_named(nowhere: Path) -> None:
    folder = _put_marker(nowhere / "data" / "mnist")
    assert find_data("mnist", nowhere / "data") == folder


def test_data_is_found_through_the_variable(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _put_marker(nowhere / "data" / "mnist")
    monkeypatch.setenv("OUTRIDER_DATA", str(nowhere / "data"))
    assert find_data("mnist") == folder


def test_the_folder_named_comes_before_the_variable(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, variable = _put_marker(nowhere / "named"), _put_marker(nowhere / "variable")
    monkeypatch.setenv("OUTRIDER_DATA", str(variable))
    assert find_data("mnist", named) == named


def test_data_is_found_in_the_cache(nowhere: Path) -> None:
    folder = _put_marker(cache_directory() / "mnist")
    assert find_data("mnist", nowhere / "absent") == folder


@pytest.mark.parametrize("folder", [".", "cifar-10-batches-bin", "cifar10", "cifar10/cifar-10-batches-bin"])
def test_cifar_is_found_unpacked_or_not_in_its_own_folder_or_above(nowhere: Path, folder: str) -> None:
    place = nowhere / "data" / folder
    place.mkdir(parents=True)
    (place / "data_batch_1.bin").touch()
    assert find_data("cifar10", nowhere / "data") == place


def test_cifar_is_found_as_an_archive(nowhere: Path) -> None:
    (nowhere / "cifar-10-binary.tar.gz").touch()
    assert find_data("cifar10", nowhere) == nowhere


def test_shakespeare_is_found_by_its_file(nowhere: Path) -> None:
    (nowhere / "shakespeare").mkdir()
    (nowhere / "shakespeare" / "input.txt").touch()
    assert find_data("shakespeare", nowhere) == nowhere / "shakespeare"


def test_data_that_is_nowhere_is_none(nowhere: Path) -> None:
    assert find_data("mnist", nowhere) is None


def test_an_unknown_name_gets_the_nearest(nowhere: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        find_data("minst")
    assert str(caught.value) == (
        "no data set is called 'minst', known are: mnist, cifar10, shakespeare\nhint: did you mean 'mnist'?"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="XDG folders are for Linux")
def test_the_cache_follows_the_xdg_variable(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/user")
    assert cache_directory() == Path("/var/cache/user/outrider")


def test_the_cache_of_a_mac_is_in_its_library(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_directory() == Path.home() / "Library" / "Caches" / "outrider"


def test_the_cache_of_windows_is_in_local_app_data(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(nowhere / "Local"))
    assert cache_directory() == nowhere / "Local" / "outrider"
