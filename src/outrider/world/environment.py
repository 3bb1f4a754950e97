"""Reads the environment of this process as a rank: its rank, the world size, and the address of the store.

The only module that reads the variables of torchrun, SLURM and our own launcher. Starts nothing and connects to
nothing. Called by `api` to see whether ranks exist already, and by a rank to learn its own rank.
"""

from __future__ import annotations

import ipaddress
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.errors import ConfigError
from outrider.machine.devices import DeviceSpec, parse_devices

_LOOPBACK = "127.0.0.1"
_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")
# Marks ranks of our own launcher, whose other variables look like torchrun's.
_OWN_MARK = "OUTRIDER_RANK"
_DEVICES = "OUTRIDER_DEVICES"
_FRESH_RANKS = "OUTRIDER_FRESH_RANKS"
_OVERRIDES = "OUTRIDER_OVERRIDES"
_TRIAL = "OUTRIDER_TRIAL"
# Address of the starter's store: the path of a Unix socket.
_STORE = "OUTRIDER_STORE"
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The rank of a process, the world size, and the rendezvous."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    has_store: bool = False
    """Whether our starter or torchrun's agent serves the store; otherwise rank 0 does."""
    attempt: int = 0
    """Distinguishes worlds that share one store; the rendezvous distinguishes restarts of torchrun."""
    has_group: bool = False
    """Whether the program created torch's default process group; its store is then used with a prefix."""
    store: str | None = None
    """Address of an existing store of our own: the path of a socket, @name, or tcp for the master port."""

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks are known to be on this host; if false, ranks may still turn out to share one."""
        return self.local_world_size == self.world_size or _is_loopback(self.master_addr)

    @property
    def store_addr(self) -> str:
        """The address at which this rank reaches a store on the master port."""
        # On one host the store listens on loopback; the master address may be another name or address of this host.
        return _LOOPBACK if self.is_one_host else self.master_addr

    def variables(self) -> dict[str, str]:
        """The environment variables of a rank of our launcher, with torchrun's names."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            _OWN_MARK: str(self.rank),
            **({} if self.store is None else {_STORE: self.store}),
        }


def wanted_devices(given: str | Sequence[str], variables: Mapping[str, str] = os.environ) -> str | Sequence[str]:
    """The devices to use: from `outrider run --devices` if it set any, otherwise from the program."""
    return variables.get(_DEVICES) or given


def overrides(variables: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Options with which `outrider advise` and `outrider compare` replace the script's."""
    text = variables.get(_OVERRIDES)
    if not text:
        return {}
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ConfigError(f"{_OVERRIDES} must be a JSON object of options, got {text!r}", hint=f"unset {_OVERRIDES}")
    return options


def is_trial(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether this is a short run of `outrider advise`, which keeps reports but no models and checkpoints."""
    return variables.get(_TRIAL, "") not in ("", "0")


def script_variables(
    options: Mapping[str, Any], *, devices: str, is_trial: bool = False, variables: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The environment variables of a script that should run with these options instead of its own."""
    told = {_OVERRIDES: json.dumps(dict(options)), _DEVICES: devices, **({_TRIAL: "1"} if is_trial else {})}
    return {**{name: value for name, value in variables.items() if name != _TRIAL}, **told}


def wants_fresh_ranks(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether every rank must be a fresh program, because many profilers do not follow forks."""
    return variables.get(_FRESH_RANKS, "") not in ("", "0")


def tell_unused_port(environment: Environment, port: int) -> None:
    """Warn that the option `port` has no effect on ranks that another launcher started."""
    if environment.rank == 0 and port not in (0, environment.master_port):
        print(
            f"outrider: port={port} is not used: the ranks were started with MASTER_PORT={environment.master_port}",
            file=sys.stderr,
        )


def alone() -> Environment:
    """The environment of a process that is the only rank."""
    return Environment(
        rank=0, local_rank=0, world_size=1, local_world_size=1, master_addr="127.0.0.1", master_port=0, has_store=True
    )


def adopted(variables: Mapping[str, str] = os.environ) -> Environment | None:
    """The environment set by torchrun, SLURM or a similar launcher; None without one, or under our own launcher."""
    if _OWN_MARK in variables:
        return None
    if "RANK" in variables:
        return _from_torchrun(variables)
    # The shell of a batch job has SLURM_PROCID too; only a step started by srun has one process per rank.
    if "SLURM_STEP_ID" in variables and _integer(variables, "SLURM_NTASKS", default=1) > 1:
        return _from_slurm(variables)
    return None


def launched(variables: Mapping[str, str] = os.environ) -> Environment | None:
    """The environment of a rank of our own launcher; None elsewhere."""
    return _from_torchrun(variables) if _OWN_MARK in variables else None


def _from_torchrun(variables: Mapping[str, str]) -> Environment:
    missing = [name for name in _TORCHRUN_VARIABLES if not variables.get(name)]
    if missing:
        raise ConfigError(
            f"RANK is set but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not",
            hint="start the program with torchrun, or unset RANK",
        )
    rank, world_size = _integer(variables, "RANK"), _integer(variables, "WORLD_SIZE")
    # Kubernetes sets no local rank, because each rank has its own pod, unless the master address is loopback.
    address = _unbracketed(variables["MASTER_ADDR"])
    is_local = _is_loopback(address)
    return _checked(
        Environment(
            rank=rank,
            local_rank=_integer(variables, "LOCAL_RANK", default=rank if is_local else 0),
            world_size=world_size,
            local_world_size=_integer(variables, "LOCAL_WORLD_SIZE", default=world_size if is_local else 1),
            master_addr=address,
            master_port=_integer(variables, "MASTER_PORT"),
            has_store=_OWN_MARK in variables or variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            store=variables.get(_STORE) if _OWN_MARK in variables else None,
        )
    )


def _from_slurm(variables: Mapping[str, str]) -> Environment:
    world_size = _integer(variables, "SLURM_NTASKS")
    local_world_size = _slurm_tasks_here(variables, world_size)
    is_one_host = local_world_size == world_size
    address = variables.get("MASTER_ADDR") or (_LOOPBACK if is_one_host else variables.get("SLURM_LAUNCH_NODE_IPADDR"))
    if not address:
        raise ConfigError(
            "SLURM started the ranks on several nodes, but MASTER_ADDR is not set",
            hint="export MASTER_ADDR with the name of the first node before srun",
        )
    # All ranks of a job step derive the same port without communication; rank 0 opens it.
    default_port = 15_000 + _integer(variables, "SLURM_JOB_ID", default=0) % 20_000
    return _checked(
        Environment(
            rank=_integer(variables, "SLURM_PROCID"),
            local_rank=_integer(variables, "SLURM_LOCALID"),
            world_size=world_size,
            local_world_size=local_world_size,
            master_addr=_unbracketed(address),
            master_port=_integer(variables, "MASTER_PORT", default=default_port),
        )
    )


def _slurm_tasks_here(variables: Mapping[str, str], world_size: int) -> int:
    """The number of ranks on this node, from SLURM's list of tasks per node, for example 2(x3),1."""
    tasks: list[int] = []
    for entry in variables.get("SLURM_STEP_TASKS_PER_NODE", str(world_size)).split(","):
        count, _, repeats = entry.partition("(x")
        tasks += [int(count)] * int(repeats.rstrip(")") or 1)
    return tasks[min(_integer(variables, "SLURM_NODEID", default=0), len(tasks) - 1)]


def _unbracketed(address: str) -> str:
    """Remove the brackets of an IPv6 address, which are used if a port may follow."""
    return address[1:-1] if address.startswith("[") and address.endswith("]") else address


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address.lower() in _LOOPBACK_NAMES


def _integer(variables: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = variables.get(name)
    if not text:
        if default is None:
            raise ConfigError(f"{name} is not set", hint="start the ranks with torchrun or srun")
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"{name} must be a whole number, got {text!r}", hint=f"unset {name}, or use torchrun"
        ) from None


def _checked(environment: Environment) -> Environment:
    if not 0 <= environment.rank < environment.world_size:
        raise ConfigError(
            f"RANK must be 0 to {environment.world_size - 1} with WORLD_SIZE={environment.world_size}, "
            f"got {environment.rank}",
            hint="start the program with torchrun, or unset RANK",
        )
    return environment


def local_devices(
    environment: Environment, devices: str | Sequence[str], *, cuda_devices: Sequence[str]
) -> tuple[DeviceSpec, ...]:
    """The devices of this host's ranks under another launcher; `devices` lists all ranks, or the ranks of one host."""
    if devices == "auto":
        names = cuda_devices or ("cpu",)
        return parse_devices([names[rank % len(names)] for rank in range(environment.local_world_size)])
    specs = parse_devices(devices)
    if len(specs) == environment.world_size:
        first = environment.rank - environment.local_rank
        return specs[first : first + environment.local_world_size]
    if len(specs) == environment.local_world_size:
        return specs
    raise ConfigError(
        f"{len(specs)} devices given for {environment.world_size} ranks that were started already",
        hint='give one device per rank, or devices="auto"',
    )
