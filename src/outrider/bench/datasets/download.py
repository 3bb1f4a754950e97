"""Downloads of the official files into the user's cache, by pooch.

Decides where each file may be had, in which order, and that a broken download goes on where it stopped. Every wait on
the network is short, so that a run without one goes on with a stand-in. Called by `source.locate`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from outrider.bench.datasets import cifar10, shakespeare
from outrider.bench.datasets.location import cache_directory
from outrider.errors import DataError, named

CONNECT_LIMIT_S = 5.0
READ_LIMIT_S = 15.0
_CHUNK_BYTES = 1 << 16
_PARTIAL_CONTENT = 206
_RANGE_NOT_SATISFIABLE = 416


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteFile:
    """A file, its MD5 and where it may be had: the official place first, then mirrors."""

    name: str
    md5: str
    urls: tuple[str, ...]


def _mnist_file(name: str, md5: str) -> RemoteFile:
    # The original host answers no more; these two are the mirrors that it named last.
    hosts = ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist")
    return RemoteFile(name=name, md5=md5, urls=tuple(f"{host}/{name}" for host in hosts))


FILES: dict[str, tuple[RemoteFile, ...]] = {
    "mnist": (
        _mnist_file("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        _mnist_file("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
        _mnist_file("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
        _mnist_file("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
    ),
    "cifar10": (
        RemoteFile(
            name=cifar10.ARCHIVE,
            md5=cifar10.ARCHIVE_MD5,
            urls=(
                f"https://www.cs.toronto.edu/~kriz/{cifar10.ARCHIVE}",
                f"https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/{cifar10.ARCHIVE}",
            ),
        ),
    ),
    "shakespeare": (
        RemoteFile(
            name=shakespeare.FILE,
            md5=shakespeare.MD5,
            urls=(
                "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
                "https://storage.googleapis.com/download.tensorflow.org/data/shakespeare.txt",
            ),
        ),
    ),
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
    """A downloader for pooch that keeps what it has got in `partial` and asks for the rest only."""

    def fetch(url: str, output_file: str, _: Any) -> None:
        for _attempt in ("the rest", "all of it, where there was no such rest"):
            if _fetch_rest(url, partial):
                break
            partial.unlink()
        partial.replace(output_file)

    return fetch


def _fetch_rest(url: str, partial: Path) -> bool:
    """Append what is missing; False where the server has nothing beyond what is there, so that it cannot be right."""
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
