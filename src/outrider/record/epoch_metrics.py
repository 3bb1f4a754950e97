"""The metrics of an epoch, which users iterate over and records contain.

Decides how the accounts of the ranks are merged. The rank fills them in, the handle passes them to the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from outrider.replica.logged_scalars import merged


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochMetrics:
    """One epoch of the whole world; times are training time unless noted, without evaluation and start-up."""

    epoch: int
    loss: float
    eval: float | None
    samples: int
    """Samples of the epoch; the two parts of an epoch that was stopped and resumed have separate metrics."""
    seconds: float
    samples_per_s: float
    share_by_rank: tuple[float, ...]
    """Each rank's share of the samples."""
    logged: dict[str, float] = field(default_factory=dict)
    """The scalars passed to `outrider.log`."""
    learning_rate: float
    averages: int
    """Number of averages of parameters or gradients; broadcasts of one rank's state do not count."""
    anchor: int | None
    drift: float | None
    exposed_average_fraction: float
    """Fraction of the ranks' time that averaging took from compute, without waits; at most 1.

    The cost of an average is known with the next one, which may be in the next epoch.
    """
    wait_fraction: float
    """Fraction of the ranks' time spent waiting for others, or for an average in the background to arrive."""
    eval_s: float
    """Time of the evaluation, including the broadcast to the other ranks if one rank trained alone."""
    train_s: float
    """Training time since the start of the run, this epoch included."""
    wall_s: float
    """Wall time since the start of the first epoch, evaluation included."""
    is_complete: bool
    """False for an epoch that was stopped early; an epoch that `steps` or `samples` cuts short is complete."""
    peak_memory_bytes_by_rank: tuple[int | None, ...] = ()
    """Peak memory of each rank so far: memory allocated by torch on a GPU, resident memory on a CPU."""


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
    """Part of `eval_s`: the broadcast to the other ranks if one rank trained alone."""
    peak_memory_bytes: int | None = None
    is_checkpoint_due: bool = False
    """Whether this rank's clock says that a checkpoint is due."""

    def after(self, before: RankAccount) -> RankAccount:
        """Merge both parts of an epoch; this is the later one."""
        sums = ("loss_sum", "loss_samples", "samples", "averages", "average_cost_s", "wait_s", "seconds")
        logged = dict(self.logged)
        for name, (total, weight) in before.logged.items():
            mine = logged.get(name, (0.0, 0.0))
            logged[name] = (mine[0] + total, mine[1] + weight)
        added = {name: getattr(self, name) + getattr(before, name) for name in sums}
        return replace(self, logged=logged, **added)


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
    """Merge the accounts of all ranks; the result is the same on every rank."""
    samples = sum(account.samples for account in accounts)
    seconds = max(account.seconds for account in accounts)
    loss_samples = sum(account.loss_samples for account in accounts)
    eval_samples = sum(account.eval_samples for account in accounts)
    rank_seconds = seconds * len(accounts)
    # If no average came at the end, a rank that finished early waited for the last one.
    waited_s = sum(account.wait_s + seconds - account.seconds for account in accounts)
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
        exposed_average_fraction=min(1.0, sum(account.average_cost_s for account in accounts) / rank_seconds),
        wait_fraction=waited_s / rank_seconds,
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
