"""Chooses the network interface over which a rank exchanges tensors: the interface that reaches the other ranks.

Uses the routes of this host, because its name may resolve to loopback (127.0.1.1 on Debian and Ubuntu). Sends nothing:
connecting a UDP socket only looks up the route. Called by World once all ranks have joined the store.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from outrider.errors import ConfigError, PeerLostError

VARIABLE = "GLOO_SOCKET_IFNAME"
_HINT = f"set MASTER_ADDR to an address of rank 0's host that all hosts reach, or {VARIABLE} to the interface to use"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostAddress:
    """The location of a rank in the network, as it reports it to the other ranks."""

    host: str
    stack: str
    """Identifies the network stack: ranks with the same value reach each other over loopback."""
    address: str | None
    """This host's address on the route to the master; None if that is loopback."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkInterface:
    """The interface of a rank, or the reason why none was found."""

    name: str | None
    address: str | None
    trouble: str | None = None


def place_here(master_addr: str) -> HostAddress:
    address = own_address_towards(master_addr)
    is_usable = address is not None and not is_loopback(address)
    return HostAddress(host=socket.gethostname(), stack=_network_stack(), address=address if is_usable else None)


def choose_interface(rank: int, places: Sequence[HostAddress]) -> NetworkInterface:
    """Choose the interface of this rank; ranks on one host use loopback, and the user's choice has priority."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return _of_user(chosen, rank=rank, host=places[rank].host)
    if len({place.stack for place in places}) == 1:
        return NetworkInterface(name=loopback_interface(), address="127.0.0.1")
    for address in _own_addresses(rank, places):
        name = _interface_with(address)
        if name is not None:
            return NetworkInterface(name=name, address=address)
    return NetworkInterface(name=None, address=None, trouble=_no_way(rank, places))


def trouble_with(interfaces: Sequence[NetworkInterface]) -> ConfigError | None:
    """The error to raise on all ranks if any rank found no interface."""
    for rank, interface in enumerate(interfaces):
        if interface.trouble is not None:
            return ConfigError(interface.trouble, hint=_HINT, rank=rank)
    return None


@contextmanager
def gloo_on(interface: NetworkInterface) -> Iterator[None]:
    """Make Gloo use this interface for groups created inside the context."""
    if interface.name is None or VARIABLE in os.environ:
        yield
        return
    os.environ[VARIABLE] = interface.name
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)


def unconnected(
    rank: int, places: Sequence[HostAddress], interfaces: Sequence[NetworkInterface], error: BaseException
) -> PeerLostError:
    """The error if ranks joined the store but Gloo cannot connect them."""
    found = re.search(r"remote=\[([^\]]*)\]", str(error))
    told = [_told(other, places, interfaces) for other in range(len(places))]
    lost = [other for other, one in enumerate(interfaces) if found and other != rank and one.address == found[1]]
    others = lost or [other for other in range(len(places)) if other != rank]
    return PeerLostError(
        f"{told[rank]} could not connect to {' or '.join(told[other] for other in others)}",
        hint="see that no firewall is between them, that all ranks are still running, "
        f"or set {VARIABLE} to an interface that reaches the others",
        rank=others[0] if len(others) == 1 else rank,
    )


def own_address_towards(host: str) -> str | None:
    """This host's address on the route to another host; None without a route, or for an unknown name."""
    try:
        # Any port works.
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                own: str = probe.getsockname()[0]
                return own.partition("%")[0]
        except OSError:
            continue
    return None


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def loopback_interface() -> str | None:
    return _interface_with("127.0.0.1")


def _own_addresses(rank: int, places: Sequence[HostAddress]) -> Iterator[str]:
    """Addresses at which others may reach this rank, the most likely first."""
    own = places[rank]
    if own.address is not None:
        yield own.address
    for other in places:
        # On the master's host the master name may resolve to loopback, but the routes to other ranks are known.
        if other.stack != own.stack and other.address is not None:
            towards = own_address_towards(other.address)
            if towards is not None and not is_loopback(towards):
                yield towards


def _of_user(chosen: str, *, rank: int, host: str) -> NetworkInterface:
    addresses = psutil.net_if_addrs()
    names = [name.strip() for name in chosen.split(",")]
    unknown = next((name for name in names if name not in addresses), None)
    if unknown is not None:
        trouble = f"{VARIABLE} is {chosen} on rank {rank}, but {host} has only {', '.join(sorted(addresses))}"
        return NetworkInterface(name=chosen, address=None, trouble=trouble)
    of_network = [one.address for one in addresses[names[0]] if one.family in (socket.AF_INET, socket.AF_INET6)]
    return NetworkInterface(name=chosen, address=next(iter(of_network), None))


def _interface_with(address: str) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return str(name)
    return None


def _network_stack() -> str:
    """Identify the network stack; each container of a machine may have its own, and hosts may have equal names."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def _no_way(rank: int, places: Sequence[HostAddress]) -> str:
    own = places[rank]
    other = next(index for index, place in enumerate(places) if place.stack != own.stack)
    return f"rank {rank} on {own.host} has no address that rank {other} on {places[other].host} could reach"


def _told(rank: int, places: Sequence[HostAddress], interfaces: Sequence[NetworkInterface]) -> str:
    interface = interfaces[rank]
    return f"rank {rank} on {places[rank].host} ({interface.address or 'no address'}, {interface.name})"
