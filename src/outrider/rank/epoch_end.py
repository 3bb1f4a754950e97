"""The end of an epoch before its accounting: evaluation, and the hand-over if one rank trained alone.

Decides, equally on every rank, whether resting ranks get the state before the evaluation, for it, or not at all. Called
by `TrainRun`.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from outrider.rank.driver import Driver
from outrider.rank.shared_evaluation import Evaluation, EvaluationSums
from outrider.record.epoch_metrics import RankAccount
from outrider.world.world import World

TRIED_TIMES = 3
"""Evaluations for which others are brought up to date before anybody judges whether that pays."""
# Who lags waits for the one who evaluates alone, and must not take it for lost.
ALONE_PART = 0.25


class EpochEnd:
    """Between the last step of an epoch and its accounting, on one rank."""

    def __init__(self, driver: Driver, evaluation: Evaluation | None, *, world: World, has_callbacks: bool) -> None:
        self._driver = driver
        self._evaluation = evaluation
        # Ranks that somebody else started may have a callback or an evaluation that others have not.
        told = world.exchange_json([has_callbacks, evaluation is not None], name="callbacks and evaluations")
        have_callbacks, evaluate = zip(*told, strict=True)
        self.has_callbacks = any(have_callbacks)
        """Whether any rank has callbacks."""
        self._needs_all = self.has_callbacks or len(set(evaluate)) > 1
        self._longest_alone_s = ALONE_PART * world.timeout_s
        self._shared_s: list[float] = []
        self._alone_s: list[float] = []
        self.is_worth_sharing = True
        """Whether others are to be brought up to date only to take part in an evaluation."""

    def catch_up(self, *, is_saving: bool) -> None:
        """Where it is needed anyway, it is part of training: for callbacks, or where a checkpoint comes next."""
        if self._needs_all or is_saving:
            self._driver.catch_up()

    def evaluate(self, key: str) -> EvaluationSums:
        """This rank's part; nothing where it lags. `key` names the evaluation, the same on all ranks."""
        if self._evaluation is None:
            return EvaluationSums()
        catch_up_s = self._driver.catch_up(is_training=False) if self.is_worth_sharing else 0.0
        if self._driver.lags:
            return EvaluationSums()
        with self._driver.activity.during("evaluation"):
            return self._evaluation.run(key, catch_up_s=catch_up_s, is_alone=self._driver.lead is not None)

    def judge(self, accounts: Sequence[RankAccount], *, lone: int) -> None:
        """Take in what an evaluation took for which others were brought up to date; `lone` works alone."""
        own = accounts[lone]
        if not own.catch_up_s or not own.eval_samples:
            return
        total = sum(one.eval_samples for one in accounts)
        self._alone_s.append((own.eval_s - own.catch_up_s) * total / own.eval_samples)
        self._shared_s.append(max(one.eval_s for one in accounts))
        # The first one warms up, and any other may be disturbed.
        if len(self._shared_s) >= TRIED_TIMES:
            alone_s = median(self._alone_s)
            self.is_worth_sharing = alone_s > min(median(self._shared_s), self._longest_alone_s)
