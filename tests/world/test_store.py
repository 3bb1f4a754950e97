"""Our own store: what it does, who is let in, and how it ends. Where we are root, another user really tries."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import DistNetworkError, DistStoreError

from outrider.errors import ConfigError
from outrider.launch.launcher import launch
from outrider.machine.devices import parse_devices
from outrider.store.store_client import PrivateStore, Untrusted, connect_local, connect_remote
from outrider.store.store_process import StoreProcess, serve_in_private_folder, serve_on_port, serve_under_name
from outrider.store.store_protocol import HELLO, NONCE_BYTES, PROOF_BYTES, frame
from outrider.world.environment import Environment
from outrider.world.messages import Link
from outrider.world.store import group_store, open_store

NOBODY = 65534
SECRET = b"correct horse battery staple"
LONG_S = 60.0


@pytest.fixture
def served() -> Iterator[StoreProcess]:
    with closing(serve_in_private_folder()) as server:
        yield server


@pytest.fixture
def name() -> str:
    return f"outrider-test-{os.getpid()}-{secrets.token_hex(4)}"


def opened(address: str, *, timeout_s: float = LONG_S) -> PrivateStore:
    return PrivateStore(connect_local(address, deadline_s=time.monotonic() + LONG_S), timeout_s=timeout_s)


@pytest.fixture
def store(served: StoreProcess) -> Iterator[PrivateStore]:
    with closing(opened(served.address)) as one:
        yield one


def as_nobody(attempt: Callable[[], str]) -> str:
    """What another user of this machine gets who tries that: the words of the attempt, or its error's name."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writing, attempt().encode())
        except BaseException as error:
            os.write(writing, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as told:
        words = told.read().decode()
    os.waitpid(pid, 0)
    return words


def asks(family: int, address: str | tuple[str, int], *requests: bytes) -> bytes:
    """What comes back to a client that sends these bytes, until it is turned away."""
    with socket.socket(family) as connection:
        connection.settimeout(LONG_S)
        connection.connect(address)
        try:
            connection.sendall(b"".join(requests))
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(4096), b""))
        except (ConnectionResetError, BrokenPipeError):
            return b""


# What it does, as torch's own stores do it


def use(store: Store) -> list[object]:
    store.set("a", "1")
    return [
        store.get("a"),
        store.add("n", 3),
        store.add("n", -1),
        store.get("n"),
        store.check(["a", "n"]),
        store.check(["a", "b"]),
        store.compare_set("c", "", "first"),
        store.compare_set("c", "other", "second"),
        store.compare_set("c", "first", "second"),
        store.compare_set("d", "nothing", "x"),
        store.check(["d"]),
        store.delete_key("a"),
        store.delete_key("a"),
        store.check(["a"]),
    ]


def test_it_does_what_a_store_of_torch_does(store: PrivateStore) -> None:
    assert use(store) == use(HashStore())


def test_it_does_the_same_where_c_plus_plus_calls_it(store: PrivateStore) -> None:
    assert use(PrefixStore("other", store)) == use(HashStore())


def test_several_keys_travel_at_once(store: PrivateStore) -> None:
    store.multi_set(["x", "y"], ["1", b"\x00\xff"])
    store.append("x", "2")
    assert store.multi_get(["y", "x"]) == [b"\x00\xff", b"12"]
    assert store.num_keys() == 3


def test_keys_under_a_prefix_are_apart(store: PrivateStore) -> None:
    store.set("key", "outer")
    store.under("inner").set("key", "inner")
    assert (store.get("key"), store.get("inner/key")) == (b"outer", b"inner")


def test_a_value_that_is_awaited_arrives_when_it_is_set(served: StoreProcess, store: PrivateStore) -> None:
    found: list[bytes] = []
    with closing(opened(served.address)) as other:
        waiting = threading.Thread(target=lambda: found.append(other.get("later")))
        waiting.start()
        store.set("later", "now")
        waiting.join(LONG_S)
    assert found == [b"now"]


def test_a_wait_ends_in_time_and_names_the_keys_that_did_not_come(store: PrivateStore) -> None:
    store.set("there", "")
    with pytest.raises(DistStoreError, match=r"wait timeout after 0\.05 s, keys: missing$"):
        store.wait(["there", "missing"], timedelta(milliseconds=50))
    assert store.check(["there"])


def test_many_clients_lose_no_update(served: StoreProcess) -> None:
    def count() -> None:
        with closing(opened(served.address)) as own:
            for _ in range(200):
                own.add("total", 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    with closing(opened(served.address)) as last:
        assert last.get("total") == b"800"


def test_a_large_value_arrives_whole(store: PrivateStore) -> None:
    value = secrets.token_bytes(9 * 2**20)
    store.set("large", value)
    assert store.get("large") == value


def test_a_request_that_makes_no_sense_ends_one_connection_and_no_other(
    served: StoreProcess, store: PrivateStore
) -> None:
    nonsense = [frame(b"set", b"key"), frame(b"get"), frame(), b"\xff" * 64, frame(b"add", b"n", b"many")]
    for request in nonsense:
        asks(socket.AF_UNIX, served.address, request)
    store.set("still", "there")
    assert store.get("still") == b"there"


def test_a_lost_store_is_an_error_of_the_network(served: StoreProcess, store: PrivateStore) -> None:
    served.close()
    with pytest.raises(DistNetworkError, match="lost the store at "):
        store.get("key")


def test_a_rank_that_leaves_its_group_store_does_not_open_its_file_again(served: StoreProcess) -> None:
    """The folder goes with rank 0, perhaps while another rank leaves: opening the file then would end that process."""
    environments = [
        Environment(
            rank=rank, local_rank=rank, world_size=2, local_world_size=2, master_addr="127.0.0.1", master_port=0
        )
        for rank in range(2)
    ]
    at_end: list[list[Callable[[], None]]] = [[], []]
    with closing(opened(served.address)) as first, closing(opened(served.address)) as second:
        folder = first.folder()
        groups = [
            group_store(
                store,
                environment=environment,
                timeout_s=LONG_S,
                exchange=lambda told: [told] * 2,
                at_end=at_end[environment.rank].append,
            )
            for store, environment in zip((first, second), environments, strict=True)
        ]
    groups[0].set("address", "of rank 0")
    assert groups[1].get("address") == b"of rank 0"
    assert folder is not None
    (file,) = [path for path in Path(folder).glob("groups-*") if not path.is_symlink()]
    before = file.read_bytes()
    for leave in at_end[1]:
        leave()
    del groups[1]
    assert file.read_bytes() == before
    assert groups[0].get("address") == b"of rank 0"
    assert [path.name for path in Path(folder).glob("groups-*") if path.is_symlink()] == [f"{file.name}-0"]


# One host: this user and nobody else


def tell_store(link: Link) -> None:
    link.send("store", path=os.environ["OUTRIDER_STORE"])
    link.stop_requested.wait(LONG_S)


def test_another_user_cannot_reach_the_store_of_a_run(tmp_path: Path) -> None:
    with launch(tell_store, {}, devices=parse_devices("cpu"), log_dir=tmp_path) as ranks:
        message = ranks.next_message(LONG_S)
        assert message is not None
        path = message.fields["path"]
        ports = [one for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"]
        mode = stat.S_IMODE(Path(path).parent.stat().st_mode)
        words = as_nobody(lambda: asks(socket.AF_UNIX, path, frame(b"count")).decode())
        ranks.stop()
        list(ranks.messages())
    assert words == "PermissionError"
    assert (mode, ports) == (0o700, [])


def test_another_user_who_reaches_the_socket_is_turned_away(served: StoreProcess, store: PrivateStore) -> None:
    os.chmod(Path(served.address).parent, 0o755)
    os.chmod(served.address, 0o777)
    store.set("key", "ours")
    requests = (frame(b"set", b"key", b"theirs"), frame(b"get", b"0", b"key"))
    assert as_nobody(lambda: repr(asks(socket.AF_UNIX, served.address, *requests))) == "b''"
    assert store.get("key") == b"ours"


def test_another_user_is_turned_away_where_rank_0_serves_one_host(name: str) -> None:
    with closing(serve_under_name(name)) as server, closing(opened(server.address)) as store:
        store.set("key", "ours")
        requests = (frame(b"set", b"key", b"theirs"), frame(b"get", b"0", b"key"))
        assert as_nobody(lambda: repr(asks(socket.AF_UNIX, f"\0{name}", *requests))) == "b''"
        assert store.get("key") == b"ours"


def test_a_store_of_another_user_is_refused(name: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with socket.socket(socket.AF_UNIX) as listener:
        os.seteuid(NOBODY)
        try:
            listener.bind(f"\0{name}")
            listener.listen()
        finally:
            os.seteuid(0)
        with pytest.raises(Untrusted, match=f"^the store at @{name} belongs to user {NOBODY}$"):
            connect_local(f"@{name}", deadline_s=time.monotonic() + LONG_S)


def test_a_name_in_use_is_an_error_with_a_way_out(name: str) -> None:
    with closing(serve_under_name(name)), pytest.raises(ConfigError) as caught:
        serve_under_name(name)
    assert caught.value.message == f"the store's name {name} is in use"
    assert caught.value.hint == "set MASTER_PORT to another number on all ranks"


# Several hosts: owners of the secret and nobody else


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found: int = listener.getsockname()[1]
        return found


def test_who_knows_the_secret_uses_the_store(port: int) -> None:
    with closing(serve_on_port(port, secret=SECRET)):
        wire = connect_remote("localhost", port, secret=SECRET, deadline_s=time.monotonic() + LONG_S)
        with closing(PrivateStore(wire, timeout_s=LONG_S)) as store:
            assert use(store) == use(HashStore())


def test_who_does_not_prove_the_secret_reads_and_writes_nothing(port: int) -> None:
    with closing(serve_on_port(port, secret=SECRET)):
        wire = connect_remote("127.0.0.1", port, secret=SECRET, deadline_s=time.monotonic() + LONG_S)
        with closing(PrivateStore(wire, timeout_s=LONG_S)) as store:
            store.set("key", "ours")
            guess = b"x" * (NONCE_BYTES + PROOF_BYTES)
            request = frame(b"set", b"key", b"theirs")
            answers = [asks(socket.AF_INET, ("127.0.0.1", port), *sent) for sent in ((request,), (guess, request))]
            assert {len(answer) for answer in answers} <= {0, len(HELLO) + NONCE_BYTES}
            assert store.get("key") == b"ours"


def test_a_rank_with_another_secret_is_told(port: int) -> None:
    with closing(serve_on_port(port, secret=SECRET)), pytest.raises(Untrusted) as caught:
        connect_remote("127.0.0.1", port, secret=b"wrong", deadline_s=time.monotonic() + LONG_S)
    assert str(caught.value) == f"the store at 127.0.0.1:{port} has another OUTRIDER_SECRET than this rank"


def test_a_server_that_does_not_know_the_secret_is_not_trusted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def pretend() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(HELLO + b"n" * NONCE_BYTES)
                connection.recv(4096)
                connection.sendall(b"p" * PROOF_BYTES)

        pretending = threading.Thread(target=pretend)
        pretending.start()
        with pytest.raises(Untrusted) as caught:
            connect_remote("127.0.0.1", port, secret=SECRET, deadline_s=time.monotonic() + LONG_S)
        pretending.join(LONG_S)
    assert str(caught.value) == f"the store at 127.0.0.1:{port} does not know OUTRIDER_SECRET"


def test_ranks_on_several_hosts_need_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_SECRET", raising=False)
    monkeypatch.delenv("OUTRIDER_SECRET_FILE", raising=False)
    here = Environment(rank=0, local_rank=0, world_size=2, local_world_size=1, master_addr="node0", master_port=29500)
    with pytest.raises(ConfigError) as caught:
        open_store(here, timeout_s=1)
    assert caught.value.message == "OUTRIDER_SECRET is not set, and 2 ranks meet over the network at node0"
    assert caught.value.hint == (
        "make one with `openssl rand -hex 16` and set it on all ranks, or put it into a file of mode 600 that "
        "OUTRIDER_SECRET_FILE names; ranks on one host need none with MASTER_ADDR=127.0.0.1"
    )


# How it ends

SERVER_SCRIPT = """
import sys
from outrider.store.store_process import serve_in_private_folder
server = serve_in_private_folder(remove=sys.argv[1:])
print(server.address, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A program that serves a store and does nothing else."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER_SCRIPT, str(tmp_path / "payload")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


def address_told_by(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_store_answers_while_its_starter_is_stopped(starter: subprocess.Popen[str]) -> None:
    address = address_told_by(starter)
    os.kill(starter.pid, signal.SIGSTOP)
    with closing(opened(address)) as store:
        store.set("key", "value")
        assert store.get("key") == b"value"
    os.kill(starter.pid, signal.SIGCONT)


def test_a_store_and_its_folders_go_with_a_starter_that_was_killed(
    starter: subprocess.Popen[str], tmp_path: Path, wait_until_gone: Callable[[list[int]], None]
) -> None:
    (tmp_path / "payload").mkdir()
    address = address_told_by(starter)
    with closing(opened(address)) as store:
        store.set("key", "value")
        (server,) = psutil.Process(starter.pid).children()
        starter.kill()
        wait_until_gone([server.pid])
        with pytest.raises(DistNetworkError):
            store.get("key")
    assert not Path(address).parent.exists()
    assert not (tmp_path / "payload").exists()
