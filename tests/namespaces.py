"""Two hosts on one machine for tests: network namespaces with a link between them, and a name of their own each.

Skips where namespaces are not permitted. Used by tests of ranks that meet over a network, or lose it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

SECRET = "0123456789abcdef0123456789abcdef"


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One of the two; `name` means 127.0.1.1 on itself, as on Debian, and its address on the other."""

    name: str
    namespace: str
    interface: str
    address: str
    address6: str
    hosts_file: Path

    def start(self, command: Sequence[str], *, log: Path, variables: Mapping[str, str] = {}) -> subprocess.Popen[str]:
        """Run a command on this host; it writes to the log, and it is a session of its own."""
        setup = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'
        enter = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "--mount", "sh", "-c", setup]
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        inherited = {name: value for name, value in os.environ.items() if name not in names}
        with log.open("w") as file:
            return subprocess.Popen(
                [*enter, str(self.hosts_file), self.name, *command],
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                env={**inherited, "OUTRIDER_SECRET": SECRET, "OMP_NUM_THREADS": "1", **variables},
            )

    def cut_link(self) -> None:
        _ip("-n", self.namespace, "link", "set", self.interface, "down")

    def restore_link(self) -> None:
        _ip("-n", self.namespace, "link", "set", self.interface, "up")


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other and nothing else."""
    _skip_where_impossible()
    first, second = (_host(number, folder) for number in (1, 2))
    with ExitStack() as stack:
        for host in (first, second):
            _ip("netns", "add", host.namespace)
            stack.callback(_ip, "netns", "delete", host.namespace)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        ends = [(host.interface, "netns", host.namespace) for host in (first, second)]
        _ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for host, other in ((first, second), (second, first)):
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.namespace, "address", "add", f"{host.address6}/64", "dev", host.interface, "nodad")
            _ip("-n", host.namespace, "link", "set", host.interface, "up")
            host.hosts_file.write_text(
                f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n{other.address} {other.name}\n::1 ip6-localhost\n"
            )
        yield first, second


def _host(number: int, folder: Path) -> Host:
    mark = f"{os.getpid() % 100_000}{number}"
    return Host(
        name=f"ranger{number}",
        namespace=f"outrider-{mark}",
        interface=f"veth{mark}",
        address=f"10.77.0.{number}",
        address6=f"fd77::{number}",
        hosts_file=folder / f"hosts{number}",
    )


def _skip_where_impossible() -> None:
    if sys.platform != "linux":
        pytest.skip("network namespaces are a matter of Linux")
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            pytest.skip(f"needs the program {program}")
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"network namespaces are not permitted here: {tried.stderr.strip()}")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
