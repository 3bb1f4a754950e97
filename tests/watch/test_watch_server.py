"""Who may read the live page and what: the token, the Host, GET only, and a stream that ends with the run."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from fake_run import FakeRun

import outrider
from outrider.watch import watch_server
from outrider.watch.watch_server import ASSETS, WatchServer, is_local_host

Serve = Callable[[Path], WatchServer]


class Client:
    """Plain requests to a server, with any header."""

    def __init__(self, server: WatchServer) -> None:
        parts = urlsplit(server.address)
        assert parts.hostname == "127.0.0.1"
        assert parts.port is not None
        self.port, self.path = parts.port, parts.path

    def ask(self, path: str, *, method: str = "GET", host: str | None = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request(method, path, headers={} if host is None else {"Host": host})
        response = connection.getresponse()
        response.body = b"" if "event-stream" in str(response.getheader("content-type")) else response.read()
        if response.body or response.status != 200:
            connection.close()
        return response


@pytest.fixture
def client(fake_run: FakeRun, serve: Serve) -> Client:
    return Client(serve(fake_run.folder.parent))


def test_the_page_and_its_parts_are_served_with_the_token_only(client: Client) -> None:
    page = client.ask(client.path)
    assert page.status == 200
    assert b'<section id="verdict"' in page.body
    for name in ASSETS:
        assert client.ask(f"{client.path}assets/{name}").status == 200
        assert client.ask(f"/assets/{name}").status == 404
    for path in ("/", "/wrong/", client.path[:-2] + "/", client.path[:-1], client.path.replace("/", "//", 1)):
        assert client.ask(path).status == 404, path


def test_every_start_has_another_token(fake_run: FakeRun, serve: Serve) -> None:
    addresses = {urlsplit(serve(fake_run.folder).address).path for _ in range(3)}
    assert len(addresses) == 3
    assert all(len(path) > 20 for path in addresses)


def test_only_loopback_is_bound(client: Client) -> None:
    own = socket.gethostbyname(socket.gethostname())
    if own.startswith("127."):
        pytest.skip("this machine has no other address than loopback")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((own, client.port), timeout=5)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"])
def test_nothing_but_get_is_answered(client: Client, method: str) -> None:
    assert client.ask(client.path, method=method).status == 405


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "[::2]", ""])
def test_a_name_elsewhere_that_points_here_is_refused(client: Client, host: str) -> None:
    assert client.ask(client.path, host=host).status in (400, 403)


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1:1", "LOCALHOST", "[::1]:22", "::1", "a.localhost:80"])
def test_a_tunnel_may_use_any_port_and_name_of_this_machine(host: str) -> None:
    assert is_local_host(host) or host == "::1"


def test_a_tunnel_reaches_the_page(client: Client) -> None:
    assert client.ask(client.path, host="localhost:9000").status == 200


@pytest.mark.parametrize(
    "path",
    [
        "assets/../watch_server.py",
        "assets/%2e%2e/watch_server.py",
        "assets/..%2f..%2fwatch_server.py",
        "assets/live_page.html",
        "../../etc/passwd",
        "assets//etc/passwd",
        "record.json",
    ],
)
def test_nothing_outside_the_list_is_served(client: Client, path: str) -> None:
    assert client.ask(client.path + path).status == 404


@pytest.mark.parametrize("name", ["..", "../first", "/etc", "nobody", "first/../first", "first/live", "%00"])
def test_only_runs_of_the_folder_can_be_chosen(client: Client, name: str) -> None:
    assert json.loads(client.ask(f"{client.path}view?run={name}").body)["run"] is None


def test_answers_forbid_other_sources_and_frames(client: Client) -> None:
    headers = client.ask(client.path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert (headers["referrer-policy"], headers["cache-control"]) == ("no-referrer", "no-store")


def test_no_address_of_another_machine_is_in_the_page() -> None:
    folder = Path(watch_server.__file__).parent / "assets"
    for name in ("live_page.html", "live_page.js", "live_page.css"):
        assert "//" not in (folder / name).read_text().replace("// ", ""), name


def events(response: http.client.HTTPResponse) -> Iterator[tuple[str, dict]]:
    kind = "message"
    while line := response.readline():
        text = line.decode().rstrip("\n")
        if text.startswith("event: "):
            kind = text[7:]
        elif text.startswith("data: "):
            yield kind, json.loads(text[6:])
            kind = "message"


def test_the_stream_follows_the_run_to_its_end_and_says_goodbye(fake_run: FakeRun, serve: Serve) -> None:
    server = serve(fake_run.folder)
    client = Client(server)
    response = client.ask(f"{client.path}stream")
    views = events(response)
    assert next(views)[1]["verdict"]["kind"] == "fine"
    fake_run.run_for(5.0, spent_s={"compute": 0.1, "data": 0.4}, samples=80, batches=2)
    later = next(shown for _, shown in views if shown["verdict"]["kind"] == "data")
    assert later["verdict"]["rank"] == 1
    fake_run.record("finished")
    assert next(shown for _, shown in views if shown["run"]["is_over"])["run"]["status"] == "finished"
    server.stop()
    assert [kind for kind, _ in views][-1] == "bye"
    response.close()


def test_a_run_that_vanishes_does_not_end_the_stream(fake_run: FakeRun, serve: Serve) -> None:
    client = Client(serve(fake_run.folder.parent))
    response = client.ask(f"{client.path}stream?run=first")
    views = events(response)
    assert next(views)[1]["run"]["status"] == "running"
    shutil.rmtree(fake_run.folder)
    assert next(shown for _, shown in views if shown["run"]["status"] == "gone")["verdict"]["kind"] == "gone"
    response.close()


def test_the_page_of_an_empty_folder_waits_for_a_run(tmp_path: Path, serve: Serve) -> None:
    client = Client(serve(tmp_path))
    response = client.ask(f"{client.path}stream")
    views = events(response)
    assert next(views)[1] == {"names": [], "run": None}
    FakeRun(tmp_path / "new").run_for(1.0)
    assert next(views)[1]["run"]["name"] == "new"
    response.close()


def test_a_view_is_small_however_long_the_run(tmp_path: Path, serve: Serve) -> None:
    run = FakeRun(tmp_path / "long", ranks=4, seconds_ago=5_000.0)
    run.run_for(5_000.0)
    client = Client(serve(run.folder))
    assert len(client.ask(f"{client.path}view").body) < 120_000


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(outrider.DataError, match="no folder"):
        WatchServer(tmp_path / "nothing", port=0)


def test_a_port_that_is_taken_is_refused_with_the_way_out(fake_run: FakeRun) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(outrider.ConfigError, match=f"cannot serve on port {port}") as caught:
            WatchServer(fake_run.folder, port=port)
    assert caught.value.hint == "leave --port out, or pass a free one"


def test_missing_libraries_are_named_with_the_way_out(fake_run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(outrider.ConfigError, match="the live page needs uvicorn") as caught:
        WatchServer(fake_run.folder, port=0)
    assert caught.value.hint == "pip install 'outrider[watch]'"
