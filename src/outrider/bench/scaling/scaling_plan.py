"""The plan of a scaling comparison: models, devices, and the ways to use them.

Decides which settings are valid, and which ways run on how many devices. Starts nothing, imports no torch. Called by
the command and by `scaling_measure`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from outrider.bench.iteration.iteration_plan import world_sizes
from outrider.errors import ConfigError, did_you_mean
from outrider.machine.devices import DeviceSpec
from outrider.policy.policies import FIXED_POLICIES

SINGLE = "single"
FSDP = "fsdp"
WAYS = (SINGLE, "dp", "ddp", FSDP, *FIXED_POLICIES)
"""In the order of tables; `single` always runs, the others are held against it."""
DEFAULT_MODELS = ("resnet18", "resnet34")
TITLES = {SINGLE: "one device", "dp": "DataParallel", "ddp": "torch DDP", FSDP: "FSDP2"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingPlan:
    """The settings of a comparison, checked."""

    models: tuple[str, ...]
    devices: tuple[DeviceSpec, ...]
    output: Path
    ways: tuple[str, ...] = WAYS
    batch_size: int = 512
    """Per device."""
    epochs: int = 3
    rounds: int = 1
    samples: int | None = None
    """Of an epoch; None is all of them."""
    data: Path | None = None
    may_download: bool = True
    """Where no files are found; without them a stand-in is used, and named as such."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("no model was named", hint="pass --model resnet18")
        for way in self.ways:
            _check_way(way)
        _check_at_least("batch_size", self.batch_size, 1, hint="pass --batch-size 512")
        _check_at_least("rounds", self.rounds, 1, hint="pass --rounds 1")
        _check_at_least("epochs", self.epochs, 2, hint="the first is warm-up and not counted")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run: a way to use the first so many devices, or one of them alone."""

    model: str
    way: str
    devices: tuple[DeviceSpec, ...]

    @property
    def title(self) -> str:
        return way_title(self.way)

    @property
    def num_devices(self) -> int:
        return len(self.devices)


def way_title(way: str) -> str:
    return TITLES.get(way, f"outrider {way}")


def jobs(plan: ScalingPlan) -> Iterator[Job]:
    """One round: every device alone once, then every way on 2, 4 and so on of them; equal devices run alone once."""
    for model in plan.models:
        for spec in dict.fromkeys(plan.devices):
            yield Job(model=model, way=SINGLE, devices=(spec,))
        for num_devices in world_sizes(len(plan.devices))[1:]:
            for way in plan.ways:
                if way != SINGLE:
                    yield Job(model=model, way=way, devices=plan.devices[:num_devices])


def _check_way(way: str) -> None:
    if way not in WAYS:
        hint = did_you_mean(way, WAYS, otherwise=f"ways are {', '.join(WAYS)}")
        raise ConfigError(f"no way to use several devices is called {way!r}", hint=hint)


def _check_at_least(name: str, value: int, least: int, *, hint: str) -> None:
    if value < least:
        raise ConfigError(f"{name} must be >= {least}, got {value}", hint=hint)
