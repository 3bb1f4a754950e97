"""Where data comes from: folders, then downloads from a real server on loopback, then stand-ins; never a hang."""

from __future__ import annotations

import builtins
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from outrider.bench.datasets import source as sources
from outrider.bench.datasets.dataset_files import cache_directory, md5
from outrider.bench.datasets.source import COLLECTIONS, DataSource, Located, RemoteFile, download, locate, open_part
from outrider.errors import ConfigError, DataError

CONTENT = bytes(range(256)) * 40
NAME = "input.txt"
OFFLINE = DataSource(may_download=False)


@dataclass(kw_only=True)
class Site:
    """A web server's files, and the ranges that were asked of it."""

    url: str
    files: dict[str, bytes] = field(default_factory=dict)
    knows_ranges: bool = True
    ranges: list[str | None] = field(default_factory=list)


def handler_for(site: Site) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers["Range"]
            site.ranges.append(asked)
            content = site.files.get(self.path.lstrip("/"))
            start = int(asked[len("bytes=") : -1]) if asked and site.knows_ranges else 0
            if content is None:
                self.send_error(404)
            elif start >= len(content):
                self.send_error(416)
            else:
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(len(content) - start))
                self.end_headers()
                self.wfile.write(content[start:])

        def log_message(self, *_: Any) -> None:
            """Requests are kept in `site.ranges`."""

    return Handler


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A machine without data whose cache is below `tmp_path`, and no memory of failed downloads."""
    monkeypatch.delenv("OUTRIDER_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_PROXY", "*")
    sources._download_once.cache_clear()
    yield tmp_path
    sources._download_once.cache_clear()


@pytest.fixture
def site(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A server that has the text, which is taken for the official one."""
    site = Site(url="")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler_for(site)) as server:
        site.url = f"http://127.0.0.1:{server.server_port}"
        site.files[NAME] = CONTENT
        offer(monkeypatch, f"{site.url}/{NAME}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield site
        server.shutdown()
        thread.join()


def offer(monkeypatch: pytest.MonkeyPatch, *urls: str) -> None:
    file = RemoteFile(name=NAME, md5=md5(CONTENT), urls=urls)
    monkeypatch.setattr(sources, "FILES", {"shakespeare": (file,)})


def closed_port_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"http://127.0.0.1:{probe.getsockname()[1]}/{NAME}"


# Downloads.


def test_a_download_ends_in_the_cache(site: Site) -> None:
    folder = download("shakespeare")
    assert folder == cache_directory() / "shakespeare"
    assert (folder / NAME).read_bytes() == CONTENT


def test_a_file_that_is_in_the_cache_is_not_fetched_again(site: Site) -> None:
    download("shakespeare")
    download("shakespeare")
    assert site.ranges == [None]


def test_a_broken_download_goes_on_where_it_stopped(site: Site) -> None:
    partial = cache_directory() / "shakespeare" / f"{NAME}.part"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(CONTENT[:1_000])
    folder = download("shakespeare")
    assert site.ranges == ["bytes=1000-"]
    assert (folder / NAME).read_bytes() == CONTENT
    assert not partial.exists()


def test_a_server_without_ranges_sends_all_of_it(site: Site) -> None:
    site.knows_ranges = False
    partial = cache_directory() / "shakespeare" / f"{NAME}.part"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"something else")
    assert (download("shakespeare") / NAME).read_bytes() == CONTENT


def test_a_rest_that_does_not_exist_is_fetched_from_the_start(site: Site) -> None:
    partial = cache_directory() / "shakespeare" / f"{NAME}.part"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(CONTENT + b"more")
    assert (download("shakespeare") / NAME).read_bytes() == CONTENT
    assert site.ranges == [f"bytes={len(CONTENT) + 4}-", None]


def test_a_mirror_is_asked_where_the_first_place_does_not_answer(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, closed_port_url(), f"{site.url}/absent", f"{site.url}/{NAME}")
    assert (download("shakespeare") / NAME).read_bytes() == CONTENT


def test_a_wrong_file_is_refused_with_both_hashes(site: Site) -> None:
    site.files[NAME] = b"a page that says: please sign in"
    with pytest.raises(DataError) as caught:
        download("shakespeare")
    message = caught.value.message
    assert message.startswith(f"{NAME} (MD5 {md5(CONTENT)}) could not be downloaded\n{site.url}/{NAME}: ValueError: ")
    assert md5(b"a page that says: please sign in") in message
    assert not list((cache_directory() / "shakespeare").iterdir())


def test_a_server_that_never_answers_is_not_waited_for_long(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "READ_LIMIT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        offer(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}/{NAME}")
        with pytest.raises(DataError, match=r"ReadTimeout: .*read timeout=0\.1"):
            download("shakespeare")


def test_the_limits_on_waiting_are_short() -> None:
    assert sources.CONNECT_LIMIT_S + sources.READ_LIMIT_S <= 20


def test_without_pooch_the_install_command_is_named(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_pooch(name: str, *rest: Any) -> Any:
        if name == "pooch":
            raise ModuleNotFoundError("No module named 'pooch'")
        return real_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_pooch)
    with pytest.raises(DataError) as caught:
        download("shakespeare")
    assert str(caught.value) == (
        "downloads need pooch, which is not installed\nhint: pip install 'outrider[data]', or name a folder"
    )


def test_every_collection_can_be_downloaded_from_two_places() -> None:
    assert set(sources.FILES) == set(COLLECTIONS)
    assert all(len(file.urls) == 2 for files in sources.FILES.values() for file in files)


# The decision.


def test_files_come_before_everything_else(nowhere: Path) -> None:
    (nowhere / NAME).touch()
    located = locate("shakespeare", DataSource(folder=nowhere))
    assert located == Located(
        name="shakespeare",
        title="Tiny Shakespeare",
        folder=nowhere,
        reason=f"found in {nowhere}",
        num_train=7_842,
        num_test=871,
    )
    assert not located.is_stand_in
    assert located.is_whole


def test_what_is_not_here_is_downloaded(site: Site) -> None:
    located = locate("shakespeare", DataSource())
    assert located.folder == cache_directory() / "shakespeare"
    assert located.reason == f"downloaded to {located.folder}"


def test_nothing_is_downloaded_where_that_was_not_allowed(site: Site) -> None:
    assert locate("shakespeare", OFFLINE).is_stand_in
    assert site.ranges == []


def test_without_files_and_network_there_is_a_stand_in(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = closed_port_url()
    offer(monkeypatch, url)
    located = locate("shakespeare", DataSource())
    assert (located.title, located.is_stand_in) == ("Markov verses (stand-in)", True)
    assert not located.is_whole
    assert located.reason.startswith(
        f"no Tiny Shakespeare files here; {NAME} (MD5 {md5(CONTENT)}) could not be downloaded\n{url}: ConnectionError: "
    )


def test_a_network_that_is_not_there_is_waited_for_once(site: Site) -> None:
    del site.files[NAME]
    first, second = locate("shakespeare", DataSource()), locate("shakespeare", DataSource())
    assert first == second
    assert len(site.ranges) == 1


def test_a_stand_in_that_is_not_wanted_is_an_error(nowhere: Path) -> None:
    with pytest.raises(DataError) as caught:
        locate("mnist", DataSource(may_download=False, may_stand_in=False))
    assert str(caught.value) == (
        "no MNIST files here\nhint: name the folder that holds them with --data or $OUTRIDER_DATA"
    )


@pytest.mark.parametrize("name", COLLECTIONS)
def test_every_stand_in_says_so_and_has_the_size_announced(nowhere: Path, name: str) -> None:
    located = locate(name, DataSource(may_download=False, max_samples=60))
    assert "(stand-in)" in located.title
    assert len(open_part(located, "train")) == located.num_train == 60
    assert len(open_part(located, "test")) == located.num_test


def test_a_part_of_the_data_says_so_and_is_the_first(nowhere: Path) -> None:
    located = locate("mnist", DataSource(may_download=False, max_samples=1_200))
    assert (located.title, located.num_train, located.num_test) == ("glyphs (stand-in), first 1,200", 1_200, 200)
    assert not located.is_whole


def test_more_samples_than_there_are_is_all_of_them(nowhere: Path) -> None:
    assert locate("mnist", DataSource(may_download=False, max_samples=10**9)) == locate("mnist", OFFLINE)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        DataSource(folder=tmp_path / "absent")
    assert str(caught.value) == (
        f"the data folder {tmp_path / 'absent'} is not there\nhint: name a folder, or leave it out"
    )


def test_no_samples_at_all_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        DataSource(max_samples=0)
    assert str(caught.value) == "max_samples must be >= 1, got 0\nhint: leave it out for all of them"
