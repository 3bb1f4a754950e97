"""Where and under what conditions a run happens: the options that the lab has no use for.

Decides what valid values are; devices are resolved and backends chosen elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from outrider.errors import ConfigError
from outrider.replica.recipe import check_at_least, check_callable, check_choice, check_flag, check_positive

BACKENDS = ("auto", "cpu", "nccl")
OBJECTS = frozenset({"epoch_start", "epoch_end", "collate"})
"""Options that are objects of the user's, not settings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Options of a run on real devices."""

    devices: str | tuple[str, ...] = "auto"
    backend: str = "auto"
    verify: bool = False
    run_dir: Path | None = None
    checkpoint_every: float | None = None
    """Epochs between checkpoints; 0.5 is twice per epoch."""
    resume: Path | None = None
    """A run folder or one of its checkpoints."""
    epoch_start: Callable[[Any], None] | None = None
    epoch_end: Callable[[Any], None] | None = None
    workers: int = 0
    collate: Callable[[list[Any]], Any] | None = None
    resident: bool | Literal["auto"] = "auto"
    threads_per_rank: int | None = None
    """Threads of each rank; by default the ranks of a host share its cores."""
    port: int = 0
    timeout_s: float = 300.0
    record_schedule: bool = False
    sample_utilization: bool = True
    """Sample how busy the devices are, where this program starts the ranks."""

    def __post_init__(self) -> None:
        check_choice("backend", self.backend, BACKENDS)
        check_at_least("workers", self.workers, 0)
        if self.threads_per_rank is not None:
            check_at_least("threads_per_rank", self.threads_per_rank, 1)
        check_positive("checkpoint_every", self.checkpoint_every)
        check_positive("timeout_s", self.timeout_s)
        check_flag("verify", self.verify)
        check_flag("sample_utilization", self.sample_utilization)
        for name in OBJECTS:
            if getattr(self, name) is not None:
                check_callable(name, getattr(self, name))
        self._check_checkpoints()
        if self.resident not in (True, False, "auto"):
            raise ConfigError(f"unknown resident {self.resident!r}", hint='choose one of True, False, "auto"')
        if not 0 <= self.port <= 65535:
            raise ConfigError(
                f"port must be 0 to 65535, got {self.port}", hint="leave port out and a free one is taken"
            )

    def _check_checkpoints(self) -> None:
        every = self.checkpoint_every
        if every is not None and every > 1 and every % 1 != 0:
            raise ConfigError(
                f"checkpoint_every must be a whole number of epochs or a part of one, got {every:g}",
                hint="pass checkpoint_every=2 for every second epoch, or 0.5 for twice per epoch",
            )


def plain(config: RunConfig) -> dict[str, Any]:
    """The settings without the user's objects, as they are."""
    return {f.name: getattr(config, f.name) for f in fields(config) if f.name not in OBJECTS}


def settings(config: RunConfig) -> dict[str, Any]:
    """The same for `config.json`."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in plain(config).items()}
