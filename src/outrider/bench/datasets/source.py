"""Chooses the data of a benchmark: real files if they exist or can be downloaded, otherwise a stand-in.

Decides the order of places to search, and the download addresses for pooch; an interrupted download is resumed.
Network timeouts are short, so that a run without a network continues with a stand-in. Called by the zoo and by the
scaling comparison.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

from torch.utils.data import TensorDataset

from outrider.bench.datasets import cifar10, mnist, shakespeare
from outrider.bench.datasets.dataset_files import Part, cache_directory, find_data
from outrider.errors import ConfigError, DataError, named

CONNECT_LIMIT_S = 5.0
READ_LIMIT_S = 15.0
_CHUNK_BYTES = 1 << 16
_PARTIAL_CONTENT = 206
_RANGE_NOT_SATISFIABLE = 416


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteFile:
    """A file, its MD5 and its download addresses: the official one first, then mirrors."""

    name: str
    md5: str
    urls: tuple[str, ...]


# MNIST's original host answers no more; these two are the mirrors that it named last.
_MNIST_HOSTS = ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist")
_CIFAR_HOSTS = (
    "https://www.cs.toronto.edu/~kriz",
    "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10",
)
_SHAKESPEARE_URLS = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "https://storage.googleapis.com/download.tensorflow.org/data/shakespeare.txt",
)


def _on_hosts(name: str, md5: str, hosts: tuple[str, ...]) -> RemoteFile:
    return RemoteFile(name=name, md5=md5, urls=tuple(f"{host}/{name}" for host in hosts))


FILES: dict[str, tuple[RemoteFile, ...]] = {
    "mnist": tuple(_on_hosts(f"{file.name}.gz", file.md5_of_gz, _MNIST_HOSTS) for file in mnist.FILES),
    "cifar10": (_on_hosts(cifar10.ARCHIVE, cifar10.ARCHIVE_MD5, _CIFAR_HOSTS),),
    "shakespeare": (RemoteFile(name=shakespeare.FILE, md5=shakespeare.MD5, urls=_SHAKESPEARE_URLS),),
}


def download(name: str) -> Path:
    """Get a data set's files into the cache and return their folder; files that are there are kept."""
    pooch = _pooch()
    folder = cache_directory() / name
    for file in FILES[name]:
        _retrieve(pooch, file, folder)
    if name == "cifar10":
        cifar10.unpack(folder)
    return folder


def _pooch() -> Any:
    try:
        import pooch
    except ModuleNotFoundError as error:
        raise DataError(
            "downloads need pooch, which is not installed", hint="pip install 'outrider[data]', or name a folder"
        ) from error
    return pooch


def _retrieve(pooch: Any, file: RemoteFile, folder: Path) -> None:
    troubles = []
    for url in file.urls:
        try:
            pooch.retrieve(
                url, f"md5:{file.md5}", fname=file.name, path=folder, downloader=_resuming(folder / f"{file.name}.part")
            )
            return
        # requests' errors are OSErrors; pooch tells of a wrong hash by a ValueError that has both.
        except (OSError, ValueError) as error:
            troubles.append(f"{url}: {named(error)}")
    raise DataError(
        f"{file.name} (MD5 {file.md5}) could not be downloaded\n" + "\n".join(troubles),
        hint="get the file by other means and name its folder with --data or $OUTRIDER_DATA",
    )


def _resuming(partial: Path) -> Callable[[str, str, Any], None]:
    """A downloader for pooch that keeps partial data in `partial` and requests only the rest."""

    def fetch(url: str, output_file: str, _: Any) -> None:
        for _attempt in ("the rest", "all of it, where there was no such rest"):
            if _fetch_rest(url, partial):
                break
            partial.unlink()
        partial.replace(output_file)

    return fetch


def _fetch_rest(url: str, partial: Path) -> bool:
    """Append the missing part; False if the server has no more data, so that the partial file must be wrong."""
    import requests

    present_bytes = partial.stat().st_size if partial.exists() else 0
    headers = {"Range": f"bytes={present_bytes}-"} if present_bytes else {}
    with requests.get(url, headers=headers, stream=True, timeout=(CONNECT_LIMIT_S, READ_LIMIT_S)) as response:
        if response.status_code == _RANGE_NOT_SATISFIABLE and present_bytes:
            return False
        response.raise_for_status()
        # A server that knows no ranges sends the whole file.
        goes_on = response.status_code == _PARTIAL_CONTENT
        total_bytes = int(response.headers.get("content-length", 0)) + (present_bytes if goes_on else 0)
        with partial.open("ab" if goes_on else "wb") as target, _progress(partial.stem, total_bytes) as advance:
            _copy(response, target, advance)
    return True


def _copy(response: Any, target: IO[bytes], advance: Callable[[int], None]) -> None:
    advance(target.tell())
    for chunk in response.iter_content(_CHUNK_BYTES):
        target.write(chunk)
        advance(len(chunk))


@contextmanager
def _progress(name: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=total_bytes or None)
        yield lambda num_bytes: progress.update(task, advance=num_bytes)


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
        return not self.is_stand_in and self.num_train == COLLECTIONS[self.name].real.num_train


class _Content(NamedTuple):
    title: str
    num_train: int
    num_test: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Collection:
    """A data set and its stand-in of the same shapes."""

    real: _Content
    read: Callable[[Path, Part], TensorDataset]
    stand_in: _Content
    draw: Callable[[Part, int], TensorDataset]


COLLECTIONS = {
    "mnist": _Collection(
        real=_Content("MNIST", 60_000, 10_000),
        read=mnist.read_part,
        stand_in=_Content(mnist.STAND_IN_NAME, 12_000, 2_000),
        draw=mnist.draw_part,
    ),
    "cifar10": _Collection(
        real=_Content("CIFAR-10", 50_000, 10_000),
        read=cifar10.read_part,
        stand_in=_Content(cifar10.STAND_IN_NAME, 10_000, 2_000),
        draw=cifar10.draw_part,
    ),
    "shakespeare": _Collection(
        real=_Content("Tiny Shakespeare", 7_842, 871),
        read=shakespeare.read_part,
        stand_in=_Content(shakespeare.STAND_IN_NAME, 1_800, 200),
        draw=shakespeare.draw_part,
    ),
}


def locate(name: str, source: DataSource) -> Located:
    """Choose the source of the data set; the reason, or the error if none is left, lists what was tried."""
    folder = find_data(name, source.folder)
    reason = f"found in {folder}"
    if folder is None:
        trouble = f"no {COLLECTIONS[name].real.title} files here"
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
    title, num_train, num_test = collection.stand_in if folder is None else collection.real
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
