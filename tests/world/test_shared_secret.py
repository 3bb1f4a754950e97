"""Where the secret of ranks on several hosts comes from."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import FileStore, PrefixStore

from outrider.errors import ConfigError
from outrider.launch.launcher import launch
from outrider.machine.devices import parse_devices
from outrider.store.store_protocol import proof
from outrider.world.messages import Link
from outrider.world.shared_secret import check_same_secret, shared_secret
from outrider.world.world import World

SECRET = "0123456789abcdef"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_text(f"{SECRET}\n")
    return path


def test_the_secret_comes_from_the_environment_or_from_a_file(file: Path) -> None:
    assert shared_secret({"OUTRIDER_SECRET": SECRET}) == SECRET.encode()
    assert shared_secret({"OUTRIDER_SECRET_FILE": str(file)}) == SECRET.encode()
    assert shared_secret({}) is None


def test_a_file_that_others_can_read_is_refused(file: Path) -> None:
    file.chmod(0o640)
    with pytest.raises(ConfigError) as caught:
        shared_secret({"OUTRIDER_SECRET_FILE": str(file)})
    assert caught.value.message == f"{file} can be read by others: mode 640"
    assert caught.value.hint == f"run `chmod 600 {file}`"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"OUTRIDER_SECRET": "short"}, "OUTRIDER_SECRET has 5 characters, 16 are needed"),
        (
            {"OUTRIDER_SECRET": SECRET, "OUTRIDER_SECRET_FILE": "x"},
            "both OUTRIDER_SECRET and OUTRIDER_SECRET_FILE are set",
        ),
    ],
)
def test_a_secret_that_cannot_be_used_is_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        shared_secret(variables)
    assert caught.value.message == message


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="OUTRIDER_SECRET_FILE names /nowhere/secret, which cannot be read: "):
        shared_secret({"OUTRIDER_SECRET_FILE": "/nowhere/secret"})


# Under torchrun, where the store is not ours


def compared(*secrets: str | None) -> list[str | None]:
    """What each rank is told, where the ranks have these secrets."""
    barrier = threading.Barrier(len(secrets))
    told: list[Any] = [None] * len(secrets)

    def compare(rank: int) -> str | None:
        def exchange(value: Any) -> list[Any]:
            told[rank] = value
            barrier.wait(60)
            found = list(told)
            barrier.wait(60)
            return found

        secret = secrets[rank]
        try:
            check_same_secret(exchange, rank=rank, secret=None if secret is None else secret.encode())
        except ConfigError as error:
            return error.message
        return None

    with ThreadPoolExecutor(len(secrets)) as pool:
        return list(pool.map(compare, range(len(secrets))))


def test_ranks_with_the_same_secret_or_none_go_on() -> None:
    assert compared("a", "a", "a") == compared(None, None, None) == [None] * 3


def test_a_rank_without_the_secret_is_named_on_all_ranks() -> None:
    message = "OUTRIDER_SECRET is set on some ranks, but not on rank 1"
    assert compared("a", None, "a") == [message] * 3


def test_ranks_with_another_secret_are_named() -> None:
    assert compared("a", "b", "a") == [
        "OUTRIDER_SECRET of rank 0 is not that of rank 1",
        "OUTRIDER_SECRET of rank 1 is not that of ranks 0, 2",
        "OUTRIDER_SECRET of rank 2 is not that of rank 1",
    ]


def test_a_proof_of_another_rank_or_another_run_proves_nothing() -> None:
    nonces = [b"n" * 64, b"m" * 64]
    assert proof(b"a", b"rank 0", *nonces) != proof(b"a", b"rank 1", *nonces)
    assert proof(b"a", b"rank 0", *nonces) != proof(b"a", b"rank 0", *reversed(nonces))


def join_with_secrets(link: Link, secrets: list[str]) -> None:
    os.environ["OUTRIDER_SECRET"] = secrets[link.rank]
    # As ranks of torchrun do, whose agent serves the store.
    store = PrefixStore("agent", FileStore(os.environ["AGENT_STORE"], 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.world.world.open_store", lambda *_, **__: store)
        with World.join(link, timeout_s=60):
            pass


def test_a_world_in_a_store_of_others_compares_secrets(tmp_path: Path) -> None:
    variables = {"AGENT_STORE": str(tmp_path / "store")}
    secrets = {"secrets": [SECRET, SECRET.upper()]}
    devices = parse_devices("cpu,cpu")
    with launch(join_with_secrets, secrets, devices=devices, log_dir=tmp_path, environment=variables) as ranks:
        list(ranks.messages())
        with pytest.raises(ConfigError, match=r"OUTRIDER_SECRET of rank [01] is not that of rank [01]"):
            ranks.raise_error()
