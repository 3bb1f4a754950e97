"""Decides when one rank trains alone while the others rest: when sharing a step costs more than it saves.

Every rank of a shared step sums gradients and repeats the whole update. For a small model that is most of a step, so a
slow rank delays the fast one even with few samples. Called by the splitter.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from outrider.policy.effects import AverageReport
from outrider.policy.step_cost import Cost
from outrider.policy.whole_batches import CLEARLY_QUICKER, WholeBatches

SHARED_STEPS = 16
"""Shared steps are judged after this many measurements."""
# Fewer are enough if a rank alone would clearly be quicker.
CLEAR_SHARED_STEPS = 4
# If all other ranks together have at most this part of the fastest rank's speed, the fastest begins alone, because they
# could help little. Sharing is tried later if that costs at most this part of the rest of the run. Such a trial takes
# about three steps, each with half of the slowest rank's time for a whole batch, plus the warm-up of that rank.
SMALL_HELP = 0.25
FIRST_TRIAL_PART = 0.03
FIRST_TRIAL_STEPS = 3
FIXED_PART = 0.5
WARM_UP_MS = 10.0
"""Warm-up time of a first step, at the speed of the fastest rank."""
# A rank's fitted time comes out too long for work alone, because other ranks computed at the same time. So a rank whose
# fitted time is below this multiple of a shared step is tried alone.
TRIED_BELOW = 1.15
# Devices that share cores, memory or a bus slow each other down. If the run is long enough to pay for it, a rank is
# tried alone once, even if its fitted time promises nothing.
TRIED_ONCE_BELOW = 2.5
TRIED_ONCE_PART = 0.0025
STRETCH_MS = 2000.0
STRETCH_MIN, STRETCH_MAX = 16, 1024
# Resting ranks wait for the end of a stretch; the wait must not look as if the working rank were lost.
LONGEST_STRETCH_S = 30.0
FIRST_STRETCH = 1
"""Batches of the first stretch of a rank that has no measurement yet."""
# A trial of one rank alone has two stretches, a warm-up and the measurement. In short runs a stretch is this part of
# the rest of the run, but at least so many batches, and a trial that already loses too much is not completed.
TRIAL_STRETCH_PART = 0.02
TRIAL_STRETCH_LEAST = 4
LOST_PART = 0.01
# The alternative is tried again now and then, at a cost of about this part of the time: first to explore, then measure.
TRIAL_STEPS = SHARED_STEPS + 8
TRIAL_PART = 0.01
# Each consecutive trial that shows nothing new halves that part, down to this.
LEAST_TRIAL_PART = 0.001
# If a rank alone would take at most this part of a shared step, this many steps in a row are enough to decide.
CLEARLY_LESS = 0.85
CLEAR_STEPS = 2
# The fastest rank is clear if the next one takes this many times as long.
CLEARLY_FASTER = 1.25
# Shared steps do not tell similar ranks apart. Another rank is also tried alone if that costs at most this part of the
# time until all ranks are tried again, even if it may take up to this many times as long. The faster rank stays.
# Such a trial has short stretches, and ends early if the rank clearly takes longer.
COMPARED_PART = 0.01
COMPARED_BELOW = 4.0
# The first shared steps are few and often slow. A rank that goes alone after them is compared with sharing once more,
# which takes about so many steps, if that costs at most this part of the rest of the run and sharing may still gain.
SECOND_LOOK_STEPS = 3
SECOND_LOOK_PART = 0.01
SUMS_HANDED_OVER = 6
"""Transfers of a trial, in gradient all-reduces: model and optimizer state are about three, there and back."""
# After the comparison, a lone rank gives way to another one that takes at most this part of its time.
GIVES_WAY_BELOW = 0.9


class Alone:
    """Compares one rank alone with shared steps: fitted times decide what to try, measured times decide what stays."""

    def __init__(self, *, longest_stretch_s: float = LONGEST_STRETCH_S, only: int | None = None) -> None:
        """`only`: the one rank that may work alone, and then stays alone until the end of the run; None if any may.

        It cannot be tried alone. Before it stays alone, whole batches that it takes in shared steps are measured.
        """
        self._longest_ms = 1e3 * longest_stretch_s
        self._only = only
        self.gains: tuple[float, ...] = ()
        """How many times as fast each rank is expected to be while others rest and leave it their cores."""
        self.rank: int | None = None
        """The rank that works alone; None while all ranks share steps."""
        self.lasted = 0
        """Batches taken alone since all ranks last shared steps; kept until a rank next goes alone."""
        self._shared_ms: deque[float] = deque(maxlen=SHARED_STEPS)
        self._expected_ms = 0.0
        # Steps until the alternative is tried.
        self._left = 0
        self._has_warmed_up = self._is_proven = False
        self._ms, self._batches = 0.0, 0
        self._trial_stretch = self._last_stretch = STRETCH_MIN
        # Whether shared steps are on trial, and the cost of the trial so far. The first shared steps are a trial, too.
        self._is_trial = True
        self._spent_ms, self._spent_steps = 0.0, 0
        self._paused_ms = 0.0
        """Time per batch that a user's loop recently spent on something other than training, while others rested."""
        self._trial_part = TRIAL_PART
        self._num_clear = 0
        self._is_tried = False
        # Upper bound of each rank's time for a whole batch, from its fastest part so far; hiccups do not count.
        self._at_most_ms: list[float] = []
        # Times of whole batches on each rank: expected when all ranks last shared, and measured alone since then. The
        # second holds only ranks that were tried.
        self._thought_ms: list[float] = []
        self._alone_ms: dict[int, float] = {}
        # Expected slowness of the slowest rank relative to the fastest; None once a first trial of sharing is decided.
        self._slowness: float | None = None
        self.is_unshared = False
        """Whether a rank works alone without a trial, because the run is too short for one."""
        self._may_look_again = True
        """Whether sharing may be tried once more after a rank went alone by the first shared steps."""
        self._is_hasty = False
        """Whether the rank that works alone went alone by them."""
        self._wholes = WholeBatches()

    @property
    def compares_wholes(self) -> bool:
        """Whether the only rank that may work alone is to take whole batches in shared steps now."""
        return self._wholes.is_comparing

    @property
    def stays(self) -> bool:
        """Whether a rank works alone until the end of the run."""
        return self.rank is not None and self._only is not None

    @property
    def step_ms(self) -> float | None:
        """Time of a usual batch in the current mode, shared or alone; None until it is measured.

        Of a rank that stays alone the fitted time counts until then.
        """
        if self.rank is not None:
            return self._expected_ms if self._is_proven or self.stays else None
        return self._shared if len(self._shared_ms) == SHARED_STEPS else None

    @property
    def stretch(self) -> int:
        """Steps until the ranks meet again: few on trial, then about two seconds' worth, to notice requests to stop.

        Those of the only rank that may work alone grow slowly: a user's loop may pause for long every so many batches.
        """
        if not self._expected_ms:
            return FIRST_STRETCH
        steps = self._steps_of(self._expected_ms)
        if not self._is_proven:
            return min(self._trial_stretch, steps)
        return steps if self._only is None else min(2 * self._last_stretch, steps)

    def begin(self, rank: int, *, slowness: float, steps_left: float) -> bool:
        """Let a rank begin alone before anything is measured, if it may; returns whether it does.

        The slowest rank takes about `slowness` times as long.
        """
        is_unshared = not _pays_for_sharing(slowness, steps_left)
        if self._only is not None and not (is_unshared and rank == self._only):
            # Nobody would find out whether sharing is better.
            return False
        self._enter(rank, 0.0)
        self._left = math.ceil(steps_left) + 1
        self._slowness = slowness
        self.is_unshared = is_unshared
        return True

    def stay(self, rank: int) -> None:
        """Let the only rank that may work alone do so until the end of the run, if it does not yet."""
        if self.rank is None:
            self._enter(rank, 0.0)

    def share_always(self) -> None:
        """Let all ranks share again, whatever was decided."""
        self.rank = None
        self._wholes.end()

    def gain(self, rank: int) -> float:
        """How many times as fast the rank is expected to be while others rest."""
        return self.gains[rank] if self.gains else 1.0

    def gained(self, speeds: Sequence[float]) -> tuple[float, ...]:
        """Speeds beside other ranks, as they are expected to be alone."""
        return tuple(speed * self.gain(rank) for rank, speed in enumerate(speeds))

    def _steps_of(self, step_ms: float) -> int:
        """Steps of a stretch: about two seconds, enough to make meeting cheap, and no longer than others can wait."""
        step_ms = max(step_ms, 1e-6)
        most = max(1, int(self._longest_ms / (step_ms + self._paused_ms)))
        return min(most, max(STRETCH_MIN, min(STRETCH_MAX, round(STRETCH_MS / step_ms))))

    def forget(self) -> None:
        """Forget the times of shared steps, because they change from now on."""
        self._shared_ms.clear()

    def spent(self, report: AverageReport) -> None:
        """Record the cost of any shared step, including steps that explore splits or capture new shapes."""
        if self._is_trial:
            self._spent_ms += _step_ms(report)
            self._spent_steps += 1

    def measure(self, report: AverageReport) -> None:
        """Record the time of a usual shared step."""
        self._shared_ms.append(_step_ms(report))

    def bound(self, report: AverageReport) -> None:
        """Update bounds from a shared step of a usual batch: the time of a rank's part times the parts, less gains."""
        whole_ms = [
            facts.compute_ms * report.samples / facts.samples / self.gain(rank)
            if facts.samples and facts.compute_ms > 0
            else math.inf
            for rank, facts in enumerate(report.ranks)
        ]
        self._at_most_ms = [min(pair) for pair in zip(self._at_most_ms or whole_ms, whole_ms, strict=True)]

    def shared(
        self, report: AverageReport, costs: Sequence[Cost], total: int, *, steps_left: float | None = None
    ) -> str | None:
        """Record a usual shared step of `total` samples; returns the reason if a rank continues alone."""
        self._left -= 1
        self.measure(report)
        if len(self._shared_ms) < CLEAR_SHARED_STEPS or self._left > 0:
            return None
        times_ms = self._of_candidates(
            min((cost.fixed_ms + cost.per_sample_ms * total) / self.gain(rank), at_most_ms)
            for rank, (cost, at_most_ms) in enumerate(
                zip(costs, self._at_most_ms or [math.inf] * len(costs), strict=True)
            )
        )
        alone_ms = min(times_ms)
        if len(self._shared_ms) < SHARED_STEPS and alone_ms > CLEARLY_QUICKER * self._shared:
            return None
        is_close = alone_ms < TRIED_BELOW * self._shared
        if not is_close and not self._may_be_tried_once(alone_ms, steps_left):
            self._left = SHARED_STEPS
            self._is_trial, self._trial_part = False, TRIAL_PART
            return None
        if self._only is not None:
            self._is_tried = True
            self._wholes.begin()
            return None
        self._begin(times_ms, steps_left)
        return f"a shared step takes {self._shared:.2f} ms, rank {self.rank} alone {alone_ms:.2f} ms by its fitted time"

    def _of_candidates(self, times_ms: Iterable[float]) -> list[float]:
        """The times, infinite for ranks that may not work alone."""
        return [ms if self._only in (None, rank) else math.inf for rank, ms in enumerate(times_ms)]

    def _may_be_tried_once(self, alone_ms: float, steps_left: float | None) -> bool:
        """Whether a trial against the advice of the fitted time costs little of the rest of the run."""
        if self._is_tried or steps_left is None or alone_ms >= TRIED_ONCE_BELOW * self._shared:
            return False
        return TRIAL_STEPS * (alone_ms / self._shared - 1) < TRIED_ONCE_PART * steps_left

    def whole(self, report: AverageReport, *, steps_left: float | None = None) -> str | None:
        """Record a shared step whose batch the only rank took whole; returns the reason if it continues alone."""
        assert self._only is not None
        facts = report.ranks[self._only]
        is_quicker = self._wholes.add(facts.compute_ms / self.gain(self._only), shared_ms=self._shared)
        if is_quicker is None:
            return None
        if not is_quicker:
            self._left = self._wholes.put_off()
            return None
        alone_ms = self._wholes.typical_ms
        self._begin(self._of_candidates([alone_ms] * len(report.ranks)), steps_left)
        return f"a shared step takes {self._shared:.2f} ms, a whole batch on rank {self.rank} {alone_ms:.2f} ms"

    def shared_at_first(self, report: AverageReport, *, steps_left: float | None = None) -> str | None:
        """Record a steady shared step before times can be fitted; returns the reason if a rank continues alone."""
        if not self._at_most_ms or self._only is not None:
            return None
        alone_ms, next_ms, *_ = sorted(self._at_most_ms)
        is_clear = alone_ms < CLEARLY_LESS * _step_ms(report) and alone_ms * CLEARLY_FASTER < next_ms
        self._num_clear = self._num_clear + 1 if is_clear else 0
        if self._num_clear < CLEAR_STEPS:
            return None
        self._num_clear = 0
        self.measure(report)
        self._begin(self._at_most_ms, steps_left)
        self._is_hasty = True
        return f"a shared step takes {self._shared:.2f} ms, rank {self.rank} alone about {alone_ms:.2f} ms"

    def _begin(self, times_ms: Sequence[float], steps_left: float | None) -> None:
        """Let the rank with the shortest time continue alone."""
        self._is_hasty = False
        alone_ms = min(times_ms)
        self._enter(times_ms.index(alone_ms), alone_ms, steps_left)
        self._thought_ms = list(times_ms)
        self.lasted = 0
        self._is_tried = True
        self._alone_ms.clear()
        # Expect the next trial to cost as much as this one: its time beyond that of as many steps alone.
        lost_ms = self._spent_ms - self._spent_steps * alone_ms if self._is_trial else 0.0
        self._left = round(max(TRIAL_STEPS * self._shared, lost_ms) / max(alone_ms, 1e-6) / self._trial_part)
        self._trial_part = max(LEAST_TRIAL_PART, self._trial_part / 2)
        self._is_trial = False

    def _enter(self, rank: int, alone_ms: float, steps_left: float | None = None) -> None:
        """Let a rank work alone; its time is measured after a first stretch."""
        self._wholes.end()
        self.rank, self._expected_ms = rank, alone_ms
        part = math.inf if steps_left is None else TRIAL_STRETCH_PART * steps_left
        self._trial_stretch = max(TRIAL_STRETCH_LEAST, int(min(part, STRETCH_MIN)))
        self._has_warmed_up = self._is_proven = False
        self._ms, self._batches = 0.0, 0

    def alone(self, report: AverageReport, *, is_usual: bool = True, steps_left: float | None = None) -> str | None:
        """Record a stretch; returns the reason if another rank or all ranks take over. Judges only usual batches.

        `steps_left` is the number of steps until the end of the run, if known.
        """
        assert self.rank is not None
        facts = report.ranks[self.rank]
        self._left -= facts.batches
        self.lasted += facts.batches
        self._last_stretch = max(STRETCH_MIN, facts.batches)
        # The first stretch carries the warm-up of whole batches; a short one says little.
        if self._has_warmed_up and is_usual:
            self._ms += facts.compute_ms
            self._batches += facts.batches
        self._has_warmed_up = True
        if facts.batches:
            self._paused_ms = max(facts.paused_ms / facts.batches, self._paused_ms / 2)
        if not self._expected_ms and facts.batches:
            self._expected_ms = facts.compute_ms / facts.batches
        if self._batches >= SHARED_STEPS or self._loses_too_much(steps_left) or self._is_clearly_slower:
            step_ms, self._ms, self._batches = self._ms / self._batches, 0.0, 0
            # Stretches on trial are short, so spread the cost of meeting over the length of a regular stretch.
            self._expected_ms = step_ms + facts.exposed_ms / self._steps_of(step_ms)
            self._is_proven = True
            if self.stays:
                return None
            if self._slowness is not None:
                return self._try_others_at_first(self._slowness, steps_left)
            if (change := self._other(steps_left)) is not None:
                return change
            if self._is_hasty and self._pays_to_look_again(steps_left):
                rank, self._may_look_again = self.rank, False
                self._try_others()
                return f"rank {rank} alone takes {step_ms:.2f} ms; few shared steps were seen, so they are tried again"
        if self._left > 0 or self.stays:
            return None
        self._try_others()
        return "the other ranks have rested for long, and are tried again"

    def _loses_too_much(self, steps_left: float | None) -> bool:
        """Whether a trial of a rank alone is slower than sharing, and completing it would cost too much of the run."""
        if self._is_proven or steps_left is None or not self._shared_ms or self._batches < TRIAL_STRETCH_LEAST:
            return False
        lost_ms = (SHARED_STEPS - self._batches) * (self._ms / self._batches - self._shared)
        return lost_ms > LOST_PART * steps_left * self._shared

    @property
    def _is_clearly_slower(self) -> bool:
        """Whether a rank on trial already takes clearly longer than another one that was measured alone."""
        others_ms = [ms for rank, ms in self._alone_ms.items() if rank != self.rank]
        if self._is_proven or self._batches < TRIAL_STRETCH_LEAST or not others_ms:
            return False
        return self._ms / self._batches > CLEARLY_FASTER * min(others_ms)

    def _pays_to_look_again(self, steps_left: float | None) -> bool:
        """Whether one more trial of sharing costs little of the rest of the run, and sharing may gain."""
        if not self._may_look_again:
            return False
        beside_ms = [ms * self.gain(rank) for rank, ms in enumerate(self._at_most_ms)]
        if sum(1 / ms for ms in beside_ms) * self._expected_ms * CLEARLY_QUICKER < 1:
            return False
        lost = SECOND_LOOK_STEPS * (self._shared / self._expected_ms - 1)
        return steps_left is None or lost <= SECOND_LOOK_PART * steps_left

    def _try_others(self) -> None:
        """Let all ranks share steps again."""
        self._left = 0
        self.rank = None
        self.is_unshared, self._slowness = False, None
        self._is_trial = True
        self._spent_ms, self._spent_steps = 0.0, 0

    def _try_others_at_first(self, slowness: float, steps_left: float | None) -> str | None:
        """Let all ranks share for the first time if that costs little of the rest of the run; returns the reason."""
        rank, step_ms, self._slowness = self.rank, self._expected_ms, None
        self.is_unshared = steps_left is not None and not _pays_for_sharing(slowness, steps_left, step_ms=step_ms)
        if self.is_unshared:
            return None
        self._try_others()
        return f"rank {rank} alone takes {step_ms:.2f} ms; the run is long enough to try the others"

    def _other(self, steps_left: float | None) -> str | None:
        """Switch to a rank that takes or may take less time, or to sharing; returns the reason if anything changes."""
        assert self.rank is not None
        rank, is_first, now_ms = self.rank, self.rank not in self._alone_ms, self._expected_ms
        self._alone_ms[rank] = now_ms
        best_ms, best = min((ms, other) for other, ms in self._alone_ms.items())
        # Ranks slowed each other down while all shared: expect others to gain from work alone as much as this one did.
        gain = min(1.0, best_ms / self._thought_ms[best]) if self._thought_ms else 1.0
        untried = [(gain * ms, other) for other, ms in enumerate(self._thought_ms) if other not in self._alone_ms]
        other_ms, other = min(untried, default=(math.inf, rank))
        steps = self._left if steps_left is None else min(self._left, steps_left)
        if self._is_worth_a_trial(other_ms, min(best_ms, self._shared), steps):
            self._enter(other, other_ms, steps_left)
            if other_ms > CLEARLY_FASTER * best_ms:
                self._trial_stretch = TRIAL_STRETCH_LEAST
            return f"rank {rank} alone takes {now_ms:.2f} ms, rank {other} perhaps {other_ms:.2f} ms"
        if best_ms > self._shared:
            self.rank = None
            # A rank that went alone early was compared with few shared steps: judge again once there are more.
            is_sure = len(self._shared_ms) >= CLEAR_SHARED_STEPS
            self._left = round(TRIAL_STEPS / TRIAL_PART) if is_sure else SHARED_STEPS
            self._trial_part = TRIAL_PART
            return f"rank {best} alone takes {best_ms:.2f} ms, a shared step {self._shared:.2f} ms"
        if best_ms < (1.0 if is_first else GIVES_WAY_BELOW) * now_ms:
            self._enter(best, best_ms)
            return f"rank {rank} alone takes {now_ms:.2f} ms, rank {best} alone {best_ms:.2f} ms"
        return None

    def _is_worth_a_trial(self, other_ms: float, known_ms: float, steps: float) -> bool:
        """Whether to try a rank that may take `other_ms`, when a batch now takes `known_ms` and `steps` are to come."""
        if other_ms < GIVES_WAY_BELOW * known_ms:
            return True
        sum_ms = max(0.0, self._shared - known_ms)
        lost_ms = 2 * STRETCH_MIN * max(0.0, other_ms - known_ms) + SUMS_HANDED_OVER * sum_ms
        return other_ms < COMPARED_BELOW * known_ms and lost_ms < COMPARED_PART * steps * known_ms

    @property
    def _shared(self) -> float:
        return median(self._shared_ms) if self._shared_ms else math.inf

    def state(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "shared_ms": list(self._shared_ms),
            "expected_ms": self._expected_ms,
            "left": self._left,
            "lasted": self.lasted,
            "spent": [self._spent_ms, self._spent_steps] if self._is_trial else None,
            "trial_part": self._trial_part,
            "is_tried": self._is_tried,
            "at_most_ms": [None if math.isinf(ms) else ms for ms in self._at_most_ms],
            "thought_ms": [None if math.isinf(ms) else ms for ms in self._thought_ms],
            "alone_ms": [[rank, ms] for rank, ms in self._alone_ms.items()],
            "slowness": self._slowness,
            "is_unshared": self.is_unshared,
            "may_look_again": self._may_look_again,
            "is_hasty": self._is_hasty,
            "wait": self._wholes.wait,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a saved state; a stretch that a checkpoint cut short is measured anew."""
        self.rank = state["rank"]
        self._shared_ms = deque(state["shared_ms"], maxlen=SHARED_STEPS)
        self._expected_ms = state["expected_ms"]
        self._left = state["left"]
        self.lasted = state.get("lasted", 0)
        spent = state.get("spent")
        self._is_trial = spent is not None
        self._spent_ms, self._spent_steps = spent or (0.0, 0)
        self._trial_part = state.get("trial_part", TRIAL_PART)
        self._is_tried = state.get("is_tried", False)
        self._at_most_ms = [math.inf if ms is None else ms for ms in state.get("at_most_ms", ())]
        self._thought_ms = [math.inf if ms is None else ms for ms in state.get("thought_ms", ())]
        self._alone_ms = dict(state.get("alone_ms", ()))
        self._slowness = state.get("slowness")
        self.is_unshared = state.get("is_unshared", False)
        self._may_look_again = state.get("may_look_again", True)
        self._is_hasty = state.get("is_hasty", False)
        self._wholes.wait = state.get("wait", self._wholes.wait)


def _step_ms(report: AverageReport) -> float:
    """Time of a shared step: that of the slowest rank, and of the sum, for which the last rank to arrive waits least.

    The times that ranks waited are those of the step before, which may have had another split.
    """
    return max(facts.compute_ms + facts.setup_ms for facts in report.ranks) + min(
        facts.exposed_ms for facts in report.ranks
    )


def _pays_for_sharing(slowness: float, steps_left: float, *, step_ms: float = math.inf) -> bool:
    """Whether a first trial of sharing costs little compared with `steps_left` steps of one rank."""
    steps = FIRST_TRIAL_STEPS * (1 + FIXED_PART * slowness) + WARM_UP_MS * slowness / max(step_ms, 1e-6)
    return steps <= FIRST_TRIAL_PART * steps_left
