"""Which data a benchmark gets: real files where they are or can be had, else a stand-in; and how a rank opens them.

Decides between files, download and stand-in, once, in the process that starts the ranks. Reads no sample there: every
rank opens the data itself by what was decided, so that nothing large travels. Called by the zoo.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torch.utils.data import TensorDataset

from outrider.bench.datasets import cifar10, glyphs, mnist, shakespeare, shapes, verses
from outrider.bench.datasets.download import download
from outrider.bench.datasets.location import find_data
from outrider.bench.datasets.pair import Part
from outrider.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSource:
    """Where data may come from; folders are always looked at first, `folder` before $OUTRIDER_DATA and the cache."""

    folder: str | Path | None = None
    may_download: bool = True
    may_stand_in: bool = True
    max_samples: int | None = None
    """Use the first so many training samples only, and as large a part of the test set; None for all."""

    def __post_init__(self) -> None:
        if self.max_samples is not None and self.max_samples < 1:
            raise ConfigError(f"max_samples must be >= 1, got {self.max_samples}", hint="leave it out for all of them")
        if self.folder is not None and not Path(self.folder).expanduser().is_dir():
            raise ConfigError(f"the data folder {self.folder} is not there", hint="name a folder, or leave it out")


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """Data that was decided on, small enough to travel to every rank."""

    name: str
    title: str
    """For people: says so where it is a stand-in or not all of it."""
    folder: Path | None
    """None for a stand-in."""
    reason: str
    num_train: int
    num_test: int

    @property
    def is_stand_in(self) -> bool:
        return self.folder is None

    @property
    def is_whole(self) -> bool:
        """Real and all of it: only then may results be held against published ones."""
        return not self.is_stand_in and self.num_train == COLLECTIONS[self.name].num_train


@dataclass(frozen=True, kw_only=True, slots=True)
class _Collection:
    """A data set and its stand-in of the same shapes."""

    title: str
    num_train: int
    num_test: int
    read: Callable[[Path, Part], TensorDataset]
    stand_in_title: str
    stand_in_num_train: int
    stand_in_num_test: int
    draw: Callable[[Part, int], TensorDataset]


COLLECTIONS = {
    "mnist": _Collection(
        title="MNIST",
        num_train=60_000,
        num_test=10_000,
        read=mnist.read_part,
        stand_in_title=glyphs.NAME,
        stand_in_num_train=12_000,
        stand_in_num_test=2_000,
        draw=glyphs.draw_part,
    ),
    "cifar10": _Collection(
        title="CIFAR-10",
        num_train=50_000,
        num_test=10_000,
        read=cifar10.read_part,
        stand_in_title=shapes.NAME,
        stand_in_num_train=10_000,
        stand_in_num_test=2_000,
        draw=shapes.draw_part,
    ),
    "shakespeare": _Collection(
        title="Tiny Shakespeare",
        num_train=7_842,
        num_test=871,
        read=shakespeare.read_part,
        stand_in_title=verses.NAME,
        stand_in_num_train=1_800,
        stand_in_num_test=200,
        draw=verses.draw_part,
    ),
}


def locate(name: str, source: DataSource) -> Located:
    """Decide where the data set comes from; what was tried is in the reason, or in the error where nothing is left."""
    folder = find_data(name, source.folder)
    reason = f"found in {folder}"
    if folder is None:
        trouble = f"no {COLLECTIONS[name].title} files here"
        if source.may_download:
            downloaded = _download_once(name)
            folder, reason = downloaded.folder, f"downloaded to {downloaded.folder}"
            trouble = f"{trouble}; {downloaded.trouble}"
        if folder is None:
            reason = trouble
    if folder is None and not source.may_stand_in:
        raise DataError(reason, hint="name the folder that holds them with --data or $OUTRIDER_DATA")
    return _located(name, folder, reason=reason, max_samples=source.max_samples)


def open_part(located: Located, part: Part) -> TensorDataset:
    """The training or the test set; called in every rank."""
    collection = COLLECTIONS[located.name]
    count = located.num_train if part == "train" else located.num_test
    if located.folder is None:
        return collection.draw(part, count)
    whole = collection.read(located.folder, part)
    return whole if len(whole) == count else TensorDataset(*(column[:count] for column in whole.tensors))


def _located(name: str, folder: Path | None, *, reason: str, max_samples: int | None) -> Located:
    collection = COLLECTIONS[name]
    title = collection.stand_in_title if folder is None else collection.title
    num_train = collection.stand_in_num_train if folder is None else collection.num_train
    num_test = collection.stand_in_num_test if folder is None else collection.num_test
    if max_samples is not None and max_samples < num_train:
        title = f"{title}, first {max_samples:,}"
        num_train, num_test = max_samples, max(1, num_test * max_samples // num_train)
    return Located(name=name, title=title, folder=folder, reason=reason, num_train=num_train, num_test=num_test)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Downloaded:
    folder: Path | None
    trouble: str = ""


@cache  # a sweep asks for every run: one wait for a network that is not there is enough
def _download_once(name: str) -> _Downloaded:
    try:
        return _Downloaded(folder=download(name))
    except DataError as error:
        hint = f" (hint: {error.hint})" if error.hint else ""
        return _Downloaded(folder=None, trouble=f"{error.message}{hint}")
