"""The options of a run on real devices, which the lab does not use: devices, backend, folders, checkpoints, workers.

Decides which values are valid; devices are resolved and backends chosen elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from outrider.average.transport.backend_table import AUTO, BACKENDS, BackendSpec, backend_spec
from outrider.errors import ConfigError
from outrider.record.checkpoint_schedule import DEFAULT_EVERY, Every, parse_every
from outrider.replica.option_info import options_where
from outrider.replica.recipe import check_at_least, check_callable, check_choice, check_flag, check_positive
from outrider.trackers.tracker import Tracker, name_of

DEFAULT_GRACE_S = 25.0
"""SLURM and Kubernetes kill 30 s after SIGTERM; this leaves time to stop and to write the record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Options of a run on real devices; `OPTION_INFOS` explains each option."""

    devices: str | tuple[str, ...] = "auto"
    environments: str | tuple[str, ...] | dict[str, str] | None = None
    backend: str | BackendSpec = AUTO
    verify: bool = False
    run_dir: Path | None = None
    checkpoint_every: float | str | None = DEFAULT_EVERY
    keep: int = 2
    resume: Path | Literal["auto"] | None = None
    epoch_start: Callable[[Any], None] | None = None
    epoch_end: Callable[[Any], None] | None = None
    trackers: tuple[str | Tracker, ...] = ()
    workers: int = 0
    collate: Callable[[list[Any]], Any] | None = None
    resident: bool | Literal["auto"] = "auto"
    threads_per_rank: int | None = None
    port: int = 0
    timeout_s: float = 300.0
    grace_s: float = DEFAULT_GRACE_S
    record_schedule: bool = False
    sample_utilization: bool = True
    watch: bool = False
    quiet: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.backend, BackendSpec):
            backend_spec(self.backend)
        else:
            check_choice("backend", self.backend, BACKENDS)
        check_at_least("workers", self.workers, 0)
        check_at_least("keep", self.keep, 1)
        if self.threads_per_rank is not None:
            check_at_least("threads_per_rank", self.threads_per_rank, 1)
        check_positive("timeout_s", self.timeout_s)
        check_positive("grace_s", self.grace_s)
        check_flag("verify", self.verify)
        check_flag("sample_utilization", self.sample_utilization)
        check_flag("watch", self.watch)
        for name in OBJECTS:
            if getattr(self, name) is not None:
                check_callable(name, getattr(self, name))
        parse_every(self.checkpoint_every)
        if self.resume == "auto" and self.run_dir is None:
            raise ConfigError(
                'resume="auto" needs run_dir: it goes on from the newest checkpoint there',
                hint='pass run_dir="runs/mine", the same at every start',
            )
        if self.resident not in (True, False, "auto"):
            raise ConfigError(f"unknown resident {self.resident!r}", hint='choose one of True, False, "auto"')
        if self.quiet not in (True, False, "auto"):
            raise ConfigError(f"unknown quiet {self.quiet!r}", hint='choose one of True, False, "auto"')
        if not 0 <= self.port <= 65535:
            raise ConfigError(
                f"port must be 0 to 65535, got {self.port}", hint="leave port out and a free one is taken"
            )

    @property
    def every(self) -> Every:
        """When checkpoints are due."""
        return parse_every(self.checkpoint_every)

    def backend_spec(self, chosen: str) -> BackendSpec:
        """The declaration of the chosen backend: the user's own, or the row of this name."""
        return backend_spec(self.backend if isinstance(self.backend, BackendSpec) else chosen)


OBJECTS = options_where(RunConfig, lambda info: info.is_object)
"""Options that are functions of the user, not plain values."""
SENT_BY_NAME = options_where(RunConfig, lambda info: info.holds_code)
"""Options sent to the ranks one by one, so that errors can name them."""


def plain(config: RunConfig) -> dict[str, Any]:
    """The plain values of a config, without the user's functions."""
    return {f.name: getattr(config, f.name) for f in fields(config) if f.name not in OBJECTS}


def settings(config: RunConfig) -> dict[str, Any]:
    """The plain values of a config for `config.json`."""
    return {name: _written(value) for name, value in plain(config).items()}


def _written(value: Any) -> Any:
    if isinstance(value, BackendSpec):
        return value.name
    if isinstance(value, tuple):
        return tuple(name_of(part) if isinstance(part, Tracker) else part for part in value)
    return str(value) if isinstance(value, Path) else value
