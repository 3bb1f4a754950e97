"""Says who this process is in a world: its rank, the size of the world, and where the store is.

The only place that reads the variables of torchrun, SLURM and our own launcher. Starts nothing, connects to nothing.
Called by the front door to see whether ranks exist already, and by a rank to find itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.errors import ConfigError
from outrider.machine.devices import DeviceSpec, parse_devices

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Set for ranks of our own launcher, whose variables otherwise look like torchrun's.
_OWN_MARK = "OUTRIDER_RANK"
_DEVICES = "OUTRIDER_DEVICES"
_FRESH_RANKS = "OUTRIDER_FRESH_RANKS"
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Who a rank is, and where it meets the others."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    has_store: bool = False
    """Our starter or torchrun's agent serves the store; otherwise rank 0 does."""
    attempt: int = 0
    """torchrun's restarts share one store, so each needs keys of its own."""

    @property
    def is_one_host(self) -> bool:
        return self.local_world_size == self.world_size or self.master_addr in _LOOPBACK

    def variables(self) -> dict[str, str]:
        """What a rank of our launcher finds in its environment, as under torchrun."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            _OWN_MARK: str(self.rank),
        }


def wanted_devices(given: str | Sequence[str], variables: Mapping[str, str] = os.environ) -> str | Sequence[str]:
    """The devices to use: those of `outrider run --devices`, or else those that the program names."""
    return variables.get(_DEVICES) or given


def wants_fresh_ranks(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether every rank is to be a program of its own: profilers follow those, and often not what is forked."""
    return variables.get(_FRESH_RANKS, "") not in ("", "0")


def alone() -> Environment:
    """Who we are where there is nobody else."""
    return Environment(
        rank=0, local_rank=0, world_size=1, local_world_size=1, master_addr="127.0.0.1", master_port=0, has_store=True
    )


def adopted(variables: Mapping[str, str] = os.environ) -> Environment | None:
    """Who we are where torchrun, SLURM or the like started the ranks; None where nobody did, or our own launcher."""
    if _OWN_MARK in variables:
        return None
    if "RANK" in variables:
        return _from_torchrun(variables)
    # The shell of a batch job has SLURM_PROCID too; only a step started by srun has one process per rank.
    if "SLURM_STEP_ID" in variables and _integer(variables, "SLURM_NTASKS", default=1) > 1:
        return _from_slurm(variables)
    return None


def launched(variables: Mapping[str, str] = os.environ) -> Environment | None:
    """Who we are in a rank of our own launcher; None elsewhere."""
    return _from_torchrun(variables) if _OWN_MARK in variables else None


def _from_torchrun(variables: Mapping[str, str]) -> Environment:
    missing = [name for name in _TORCHRUN_VARIABLES if not variables.get(name)]
    if missing:
        raise ConfigError(
            f"RANK is set but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not",
            hint="start the program with torchrun, or unset RANK",
        )
    rank, world_size = _integer(variables, "RANK"), _integer(variables, "WORLD_SIZE")
    # Kubernetes sets nothing local: one pod per rank there, unless they meet on loopback.
    is_local = variables["MASTER_ADDR"] in _LOOPBACK
    return _checked(
        Environment(
            rank=rank,
            local_rank=_integer(variables, "LOCAL_RANK", default=rank if is_local else 0),
            world_size=world_size,
            local_world_size=_integer(variables, "LOCAL_WORLD_SIZE", default=world_size if is_local else 1),
            master_addr=variables["MASTER_ADDR"],
            master_port=_integer(variables, "MASTER_PORT"),
            has_store=_OWN_MARK in variables or variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=_integer(variables, "TORCHELASTIC_RESTART_COUNT", default=0),
        )
    )


def _from_slurm(variables: Mapping[str, str]) -> Environment:
    world_size = _integer(variables, "SLURM_NTASKS")
    local_world_size = _slurm_tasks_here(variables, world_size)
    is_one_host = local_world_size == world_size
    address = variables.get("MASTER_ADDR") or (
        "127.0.0.1" if is_one_host else variables.get("SLURM_LAUNCH_NODE_IPADDR")
    )
    if not address:
        raise ConfigError(
            "SLURM started the ranks on several nodes, but MASTER_ADDR is not set",
            hint="export MASTER_ADDR with the name of the first node before srun",
        )
    # Steps of one job agree on a port without talking: rank 0 opens it.
    default_port = 15_000 + _integer(variables, "SLURM_JOB_ID", default=0) % 20_000
    return _checked(
        Environment(
            rank=_integer(variables, "SLURM_PROCID"),
            local_rank=_integer(variables, "SLURM_LOCALID"),
            world_size=world_size,
            local_world_size=local_world_size,
            master_addr=address,
            master_port=_integer(variables, "MASTER_PORT", default=default_port),
        )
    )


def _slurm_tasks_here(variables: Mapping[str, str], world_size: int) -> int:
    """Ranks on this node, from SLURM's list of tasks per node, written like 2(x3),1."""
    tasks: list[int] = []
    for entry in variables.get("SLURM_STEP_TASKS_PER_NODE", str(world_size)).split(","):
        count, _, repeats = entry.partition("(x")
        tasks += [int(count)] * int(repeats.rstrip(")") or 1)
    return tasks[min(_integer(variables, "SLURM_NODEID", default=0), len(tasks) - 1)]


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
    """The devices of this host's ranks where others started them: given one per rank, or one per rank of a host."""
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
