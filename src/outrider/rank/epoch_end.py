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
"""Evaluations with all ranks brought up to date before it is judged whether that pays."""
# Lagging ranks wait for the rank that evaluates alone; the wait must not look as if that rank were lost.
ALONE_PART = 0.25


class EpochEnd:
    """What one rank does between the last step of an epoch and its accounting."""

    def __init__(
        self,
        driver: Driver,
        evaluation: Evaluation | None,
        *,
        world: World,
        has_callbacks: bool,
        is_shown: bool = False,
    ) -> None:
        """`is_shown`: the user's code runs in the process of this rank between two epochs."""
        self._driver = driver
        self._evaluation = evaluation
        # Ranks started by someone else may have a callback or an evaluation that others lack.
        told = world.exchange_json([has_callbacks, evaluation is not None, is_shown], name="callbacks and evaluations")
        have_callbacks, evaluate, show = zip(*told, strict=True)
        self.has_callbacks = any(have_callbacks)
        """Whether any rank has callbacks."""
        self.is_watched = self.has_callbacks or any(evaluate) or any(show)
        """Whether anything besides checkpoints may read the model between two epochs."""
        self._needs_all = self.has_callbacks or len(set(evaluate)) > 1
        self._longest_alone_s = ALONE_PART * world.timeout_s
        self._shared_s: list[float] = []
        self._alone_s: list[float] = []
        self.is_worth_sharing = True
        """Whether it pays to bring other ranks up to date only for an evaluation."""

    def catch_up(self, *, is_saving: bool) -> None:
        """Bring all ranks up to date, as part of training, if callbacks or a checkpoint need that anyway."""
        if self._needs_all or is_saving:
            self._driver.catch_up()

    def evaluate(self, key: str) -> EvaluationSums:
        """Evaluate this rank's part; nothing if it lags. `key` names the evaluation, the same on all ranks."""
        if self._evaluation is None:
            return EvaluationSums()
        catch_up_s = self._driver.catch_up(is_training=False) if self.is_worth_sharing else 0.0
        if self._driver.lags:
            return EvaluationSums()
        is_alone = self._driver.lead is not None
        with self._driver.activity.during("evaluation"), self._driver.threads.of(is_alone=is_alone):
            return self._evaluation.run(key, catch_up_s=catch_up_s, is_alone=is_alone)

    def judge(self, accounts: Sequence[RankAccount], *, lone: int) -> None:
        """Learn from the time of an evaluation for which ranks were brought up to date; `lone` works alone."""
        own = accounts[lone]
        if not own.catch_up_s or not own.eval_samples:
            return
        total = sum(one.eval_samples for one in accounts)
        self._alone_s.append((own.eval_s - own.catch_up_s) * total / own.eval_samples)
        self._shared_s.append(max(one.eval_s for one in accounts))
        # The first evaluation includes warm-up, and any other may be disturbed.
        if len(self._shared_s) >= TRIED_TIMES:
            alone_s = median(self._alone_s)
            self.is_worth_sharing = alone_s > min(median(self._shared_s), self._longest_alone_s)
