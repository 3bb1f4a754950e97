"""What is known of an epoch: the numbers that users iterate over and that records keep.

Decides how ranks' own accounts become the world's; the rank driver fills them in, the handle passes them on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.replica.logbook import merged


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochMetrics:
    """One epoch of the whole world; times are training time unless said, evaluation and start-up excluded."""

    epoch: int
    loss: float
    eval: float | None
    samples: int
    """Samples taken; an epoch that was resumed in its middle counts from there."""
    seconds: float
    samples_per_s: float
    share_by_rank: tuple[float, ...]
    """Part of the epoch's samples that each rank took."""
    logged: dict[str, float] = field(default_factory=dict)
    """What the step function passed to `outrider.log`."""
    learning_rate: float
    averages: int
    """Of parameters or of gradients; what one rank hands to others is none."""
    anchor: int | None
    drift: float | None
    exposed_average_fraction: float
    """Part of the ranks' time that averaging itself took out of computing; waiting for others is not in it."""
    wait_fraction: float
    """Part of the ranks' time spent waiting for others."""
    eval_s: float
    """Evaluation; where one rank worked alone, also what it took to bring the others up to date for it."""
    train_s: float
    """Training time since the start of the run, this epoch included."""
    wall_s: float
    """Wall time since the start of the first epoch, evaluation included."""
    is_complete: bool
    """False for an epoch that a stop cut short."""
    peak_memory_bytes_by_rank: tuple[int | None, ...] = ()
    """The most that each rank has needed so far: on a GPU what torch allocated, else the process's resident memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankAccount:
    """One rank's part of an epoch."""

    loss_sum: float
    loss_samples: int
    eval_sum: float
    eval_samples: int
    samples: int
    logged: dict[str, tuple[float, float]]
    averages: int
    average_cost_s: float
    wait_s: float
    seconds: float
    eval_s: float
    wants_stop: bool
    catch_up_s: float = 0.0
    """Part of `eval_s`: bringing up to date who lagged, where one rank worked alone."""
    peak_memory_bytes: int | None = None


def combine(
    accounts: Sequence[RankAccount],
    *,
    epoch: int,
    learning_rate: float,
    anchor: int | None,
    drift: float | None,
    train_s_before: float,
    wall_s: float,
    is_complete: bool,
) -> EpochMetrics:
    """The world's metrics from all ranks' accounts; the same on every rank."""
    samples = sum(account.samples for account in accounts)
    seconds = max(account.seconds for account in accounts)
    loss_samples = sum(account.loss_samples for account in accounts)
    eval_samples = sum(account.eval_samples for account in accounts)
    rank_seconds = seconds * len(accounts)
    return EpochMetrics(
        epoch=epoch,
        loss=sum(account.loss_sum for account in accounts) / loss_samples if loss_samples else float("nan"),
        eval=sum(account.eval_sum for account in accounts) / eval_samples if eval_samples else None,
        samples=samples,
        seconds=seconds,
        samples_per_s=samples / seconds,
        share_by_rank=tuple(account.samples / samples if samples else 0.0 for account in accounts),
        logged=merged([account.logged for account in accounts]),
        learning_rate=learning_rate,
        averages=accounts[0].averages,
        anchor=anchor,
        drift=drift,
        exposed_average_fraction=sum(account.average_cost_s for account in accounts) / rank_seconds,
        wait_fraction=sum(account.wait_s for account in accounts) / rank_seconds,
        eval_s=max(account.eval_s for account in accounts),
        train_s=train_s_before + seconds,
        wall_s=wall_s,
        is_complete=is_complete,
        peak_memory_bytes_by_rank=tuple(account.peak_memory_bytes for account in accounts),
    )


def as_json(metrics: EpochMetrics) -> dict[str, Any]:
    return asdict(metrics)


def from_json(fields: dict[str, Any]) -> EpochMetrics:
    by_rank = {name: tuple(fields.get(name, ())) for name in ("share_by_rank", "peak_memory_bytes_by_rank")}
    return EpochMetrics(**fields | by_rank)
