"""Which Python each rank runs in, where cards need different torch builds.

Decides what a name of an environment means, and asks each Python for its versions before a rank starts. Called by
`train()` and sessions when they start ranks. Needs no torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from outrider.errors import ConfigError
from outrider.machine.detect import ask_torch, detect_machine
from outrider.machine.devices import DeviceSpec
from outrider.machine.environment_choice import as_builds, choose_builds
from outrider.machine.variants import VariantStore
from outrider.machine.wheels import load_table

HERE = "here"
"""The name of the Python that starts the ranks."""
AUTO = "auto"
"""Instead of names: for each device the first environment with code for it, this one before torch variants."""
VARIABLE = "OUTRIDER_ENVIRONMENTS"
_ASK = """
import importlib.metadata, json, sys
try:
    torch = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    torch = None
print(json.dumps({"python": "%d.%d.%d" % sys.version_info[:3], "torch": torch}))
"""
_ASK_S = 60

Environments = str | Sequence[str] | Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPython:
    """The Python of a rank, and its torch."""

    interpreter: str
    python: str
    torch: str

    @property
    def minor(self) -> str:
        """Code that is sent as bytes can be read by the same minor version only."""
        return ".".join(self.python.split(".")[:2])


def wanted_environments(given: Environments | None, variables: Mapping[str, str] = os.environ) -> Environments | None:
    """The environments to use: those of `outrider run --environments`, otherwise those of the program."""
    return variables.get(VARIABLE) or given


def tell_unused_environments(given: Environments | None, why: str) -> None:
    """Say that the option has no effect, where ranks are not started here."""
    wanted = wanted_environments(given)
    if wanted is not None:
        print(f"outrider: environments={wanted!r} is not used: {why}", file=sys.stderr)


def rank_pythons(wanted: Environments | None, devices: Sequence[DeviceSpec]) -> tuple[RankPython, ...] | None:
    """The Python of each rank; None where all ranks run in this one."""
    if wanted is None:
        return None
    store = VariantStore.of_user()
    names = _chosen(devices, store) if wanted == AUTO else _by_rank(wanted, [str(spec) for spec in devices])
    if set(names) == {HERE}:
        return None
    return tuple(_asked(_interpreter(name, store)) for name in names)


def refuse_other_python(pythons: Sequence[RankPython]) -> None:
    """Raise where functions of this program cannot be sent to a rank, which has another minor version of Python."""
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    for rank, one in enumerate(pythons):
        if one.minor != own:
            raise ConfigError(
                f"rank {rank} would run in Python {one.python}, which cannot read functions of Python {own}",
                hint="write a script with an outrider.Session, which every rank runs from its source, or make the "
                f"environment with Python {own}",
            )


def have_same_torch(pythons: Sequence[RankPython]) -> bool:
    return len({one.torch for one in pythons}) <= 1


def _chosen(devices: Sequence[DeviceSpec], store: VariantStore) -> list[str]:
    """The name of an environment per device, told in one line where it is not this one for all."""
    if all(spec.kind != "cuda" for spec in devices):
        return [HERE] * len(devices)
    here = ask_torch(sys.executable, origin=HERE)
    variants = store.variants()
    others = as_builds(variants, {one.name: store.interpreter(one.name) for one in variants})
    facts = detect_machine(Path.cwd())
    builds = choose_builds(devices, [*([here] if here else []), *others], facts, load_table())
    if any(build.origin != HERE for build in builds):
        told = ", ".join(
            f"{spec}: {build.origin} (torch {build.version})" for spec, build in zip(devices, builds, strict=True)
        )
        print(f"outrider: environments of the ranks: {told}", file=sys.stderr)
    return [build.origin for build in builds]


def _by_rank(wanted: Environments, devices: Sequence[str]) -> list[str]:
    if isinstance(wanted, Mapping):
        unknown = [name for name in wanted if name not in devices]
        if unknown:
            raise ConfigError(
                f"environments names {unknown[0]!r}, which is no device of this run",
                hint=f"the devices are {', '.join(devices)}",
            )
        return [wanted.get(device, HERE) for device in devices]
    names = [part.strip() for part in wanted.split(",")] if isinstance(wanted, str) else [str(one) for one in wanted]
    if len(names) != len(devices):
        raise ConfigError(
            f"{len(names)} environments for {len(devices)} devices",
            hint=f'pass one per device, "{HERE}" for this one, "{AUTO}", or a mapping from devices to environments',
        )
    return names


def _interpreter(name: str, store: VariantStore) -> str:
    """The Python of a torch variant, of the folder of a virtual environment, or the Python itself."""
    if name == HERE:
        return sys.executable
    if name in store.names():
        return str(store.interpreter(name))
    path = Path(name).expanduser()
    if path.is_dir() and (path / "bin" / "python").exists():
        return str((path / "bin" / "python").absolute())
    if path.is_file() and os.access(path, os.X_OK):
        return str(path.absolute())
    known = ", ".join(store.names())
    raise ConfigError(
        f"no environment {name!r}",
        hint="pass the folder of a virtual environment, a Python, "
        + (f"or a torch variant: {known}" if known else "or a torch variant that `outrider torch install` made"),
    )


@cache
def _asked(interpreter: str) -> RankPython:
    """What this Python says of itself."""
    # Without the path of this program, whose torch may be another one.
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        told = subprocess.run(
            [interpreter, "-c", _ASK], capture_output=True, text=True, timeout=_ASK_S, check=True, env=variables
        )
        found = json.loads(told.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(
            f"the Python {interpreter} does not answer: {error}", hint="see that it starts, or name another one"
        ) from error
    if found["torch"] is None:
        raise ConfigError(
            f"the Python {interpreter} has no torch", hint="install one there: `outrider setup` finds a build that fits"
        )
    return RankPython(interpreter=interpreter, **found)
