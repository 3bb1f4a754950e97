"""Splits the batch of one shared step among the ranks so that the slowest rank takes the least time.

Does not average: any split gives the same gradient, since each rank's part is weighted by its samples.
Called by the policies balanced (Splitter) and sync (even), once per step.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from statistics import fmean
from typing import Any

from outrider.errors import ConfigError
from outrider.policy.alone import LONGEST_STRETCH_S, SMALL_HELP, Alone
from outrider.policy.effects import AverageReport, Batch, Decision
from outrider.policy.step_cost import Cost, GivenCost, TimeModel, slowest_ms
from outrider.policy.weights import proportions

__all__ = ["Split", "Splitter", "TimeModel", "even", "minimise_slowest"]

Caps = Sequence[int | None]

REFIT_EVERY = 16
# Fixed and per-sample cost can be separated only if sizes vary; no split changes the gradient, so varying is free.
EXPLORING_STEPS = 4
EXPLORING_PART = 0.25
DEAD_ZONE = 0.02
TIMES_HOLD = 512
"""Steps for which fitted times are assumed to hold; after them a rank without samples is tried again."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Samples of each rank in one step, with the reason."""

    samples: tuple[int, ...]
    reason: str

    @cached_property
    def total(self) -> int:
        return sum(self.samples)

    def batch(self, rank: int, start: int) -> Batch:
        """The rank's positions when all parts are laid out in rank order from `start`."""
        return Batch(start + self._offsets[rank], self.samples[rank])

    @cached_property
    def _offsets(self) -> list[int]:
        return list(accumulate(self.samples, initial=0))


def even(total: int, ranks: int) -> tuple[int, ...]:
    """Equal parts; the first ranks take the remainder."""
    each, left = divmod(total, ranks)
    return (each + 1,) * left + (each,) * (ranks - left)


def without_singles(samples: Sequence[int], caps: Caps | None = None) -> tuple[int, ...]:
    """Move single samples to other ranks where these have room, so that no rank has just one.

    One sample has no variance: BatchNorm rejects it in training, and one device with the whole batch would not see it.
    """
    counts = list(samples)
    if 1 not in counts:
        return tuple(counts)
    # The largest part comes first, among equal parts the lowest rank; entries whose count has changed are skipped.
    queue = [(-count, rank) for rank, count in enumerate(counts) if 0 < count < _cap(caps, rank)]
    heapq.heapify(queue)
    for rank in reversed(range(len(counts))):
        if counts[rank] == 1:
            _give_single(rank, counts, queue, caps)
    return tuple(counts)


def _give_single(rank: int, counts: list[int], queue: list[tuple[int, int]], caps: Caps | None) -> None:
    """Give the only sample of a rank to the largest part that has room."""
    own: tuple[int, int] | None = None
    while queue:
        negative, other = queue[0]
        if other == rank and -negative == counts[rank]:
            own = heapq.heappop(queue)
        elif -negative != counts[other]:
            heapq.heappop(queue)
        else:
            break
    if queue:
        _, other = heapq.heappop(queue)
        counts[other] += 1
        counts[rank] = 0
        if counts[other] < _cap(caps, other):
            heapq.heappush(queue, (-counts[other], other))
    elif own is not None:
        heapq.heappush(queue, own)


def _cap(caps: Caps | None, rank: int) -> float:
    cap = caps[rank] if caps is not None else None
    return math.inf if cap is None else cap


def minimise_slowest(models: Sequence[Cost], total: int, caps: Caps | None = None) -> tuple[int, ...]:
    """Samples per rank, at most `caps`, that sum to `total` and minimise the slowest rank's time; exact.

    It is optimal to give each sample to the rank that then has the shortest time, because a rank's time only grows.
    Samples that fit into a time known to be too short are given at once, the few others one by one.
    """
    limits = _limits(len(models), total, caps)
    counts = _below_optimum(models, limits, total)
    queue = [
        (model.fixed_ms + model.per_sample_ms * (counts[rank] + 1), rank)
        for rank, model in enumerate(models)
        if counts[rank] < limits[rank]
    ]
    heapq.heapify(queue)
    for _ in range(total - sum(counts)):
        _, rank = heapq.heappop(queue)
        counts[rank] += 1
        if counts[rank] < limits[rank]:
            next_ms = models[rank].fixed_ms + models[rank].per_sample_ms * (counts[rank] + 1)
            heapq.heappush(queue, (next_ms, rank))
    return tuple(counts)


def _limits(ranks: int, total: int, caps: Caps | None) -> list[int]:
    limits = [total if cap is None else min(cap, total) for cap in caps or (None,) * ranks]
    if sum(limits) < total:
        listed = ", ".join("none" if cap is None else str(cap) for cap in caps or ())
        raise ConfigError(
            f"a batch of {total} samples does not fit: the ranks can hold {sum(limits)} (caps {listed})",
            hint="lower batch_size, raise the caps or add a device",
        )
    return limits


def _below_optimum(models: Sequence[Cost], limits: list[int], total: int) -> list[int]:
    """Counts that fit in a time just too short for the whole batch."""
    too_short, enough = 0.0, max((m.fixed_ms + m.per_sample_ms * total for m in models), default=0.0)
    best = [0] * len(models)
    for _ in range(60):
        middle = (too_short + enough) / 2
        counts = [_fitting(model, middle, limit) for model, limit in zip(models, limits, strict=True)]
        if sum(counts) > total:
            enough = middle
            continue
        too_short, best = middle, counts
        if sum(counts) >= total - 2 * len(models):
            break
    return best


def _fitting(model: Cost, time_ms: float, limit: int) -> int:
    """The most samples that a rank can process in the time."""
    fixed_ms, per_sample_ms = model.fixed_ms, model.per_sample_ms
    if limit == 0 or fixed_ms + per_sample_ms > time_ms:
        return 0
    if per_sample_ms * limit <= time_ms - fixed_ms:
        return limit
    count = int((time_ms - fixed_ms) / per_sample_ms)
    # Division rounds, so compare the same expression that defines the optimum.
    while fixed_ms + per_sample_ms * count > time_ms:
        count -= 1
    return count


class Splitter:
    """Learns the cost of samples on each rank, and splits batches accordingly."""

    def __init__(
        self,
        *,
        world_size: int,
        shares: Sequence[float] | None = None,
        speed_hints: Sequence[float] | None = None,
        caps: Caps | None = None,
        may_rest: bool = False,
        only_alone: int | None = None,
        shares_first: bool = False,
        longest_stretch_s: float = LONGEST_STRETCH_S,
    ) -> None:
        """`may_rest` if the driver lets one rank work alone while the others rest: any, or `only_alone`, which then
        stays alone until the end of the run.

        `shares_first` if ranks must share steps first, however short the run. `longest_stretch_s` is how long other
        ranks may wait for one that works alone.
        """
        self._world_size = world_size
        self._shares = None if shares is None else proportions("shares", shares, world_size=world_size)
        self._hints = None if speed_hints is None else proportions("speed_hints", speed_hints, world_size=world_size)
        self._hinted_by = "speed_hints as given"
        self._caps = _checked_caps(caps, world_size)
        self._models = [TimeModel() for _ in range(world_size)]
        self._num_steps = 0
        self._has_shared = False
        # The first even step counts too: it gives the split around which sizes vary.
        self._exploring_left = EXPLORING_STEPS + 1 if world_size > 1 else 0
        self._explored: dict[tuple[int, bool], tuple[int, ...]] = {}
        self._usual: Split | None = None
        self._decided: tuple[int, ...] | None = None
        # No rank works alone if the user gave shares, or if caps limit what a device can hold.
        self._may_rest = may_rest and world_size > 1 and shares is None and caps is None
        self._may_begin_alone = self._may_rest and not shares_first
        self._only_alone = only_alone
        self._before_staying: str | None = None
        """Why a rank works alone for good, until one more step is shared."""
        self._follows_local = False
        self._alone = Alone(longest_stretch_s=longest_stretch_s, only=only_alone)

    @property
    def lone(self) -> int | None:
        """The rank that takes whole batches alone from now on, while the others rest; None if all share."""
        return None if self._before_staying is not None else self._alone.rank

    @property
    def soon_alone(self) -> int | None:
        """The rank that works alone for good after one more shared step, unless local steps are chosen before."""
        return None if self._before_staying is None else self._alone.rank

    @property
    def may_rest(self) -> bool:
        """Whether ranks may rest while one works alone."""
        return self._may_rest

    def may_work_alone(self, rank: int) -> bool:
        """Whether this rank may work alone while the others rest."""
        return self._may_rest and self._only_alone in (None, rank)

    def share_always(self) -> None:
        """Let no rank work alone, from now on; called while all ranks share steps."""
        self._may_rest = self._may_begin_alone = False
        self._before_staying = None
        if self._alone.compares_wholes:
            self._usual = None
        self._alone.share_always()

    @property
    def compares_wholes(self) -> bool:
        """Whether whole batches of the only rank that may work alone are compared with shared steps now."""
        return self._alone.compares_wholes

    @property
    def stays_alone(self) -> bool:
        """Whether a rank works alone until the end of the run."""
        return self.lone is not None and self._alone.stays

    @property
    def lone_after_local(self) -> int | None:
        """The rank that works alone to the end once local steps are given up; None if all ranks then share again."""
        return self._only_alone if self._may_rest else None

    def stay_alone(self) -> int | None:
        """After local steps, let the only rank that may work alone do so until the end of the run; returns that rank.

        Loops that have trained on batches of their own count differently, so their gradients are not shared again.
        """
        lone = self.lone_after_local
        if lone is not None:
            self._before_staying, self._follows_local = None, True
            self._alone.stay(lone)
        return lone

    @property
    def stretch(self) -> int:
        """Batches that rank takes alone until all ranks meet again."""
        return self._alone.stretch

    @property
    def is_exploring(self) -> bool:
        """Whether the splitter currently varies splits."""
        return (self._exploring_left > 0 or self._alone.compares_wholes) and self._shares is None

    def next(self, total: int, *, is_usual: bool = True) -> Split:
        """The split of the next step; it stays the same until the splitter learns something."""
        split = self._usual
        if split is not None and split.total == total:
            return split
        made = self._made(total)
        # The last batch of an epoch, shorter or one sample larger, must not displace the usual split.
        if is_usual and (split is None or total > split.total):
            self._usual = made
        return made

    @property
    def needs_hints(self) -> bool:
        """Whether no information is available for splitting the first batch."""
        is_known = self._hints or self._shares or any(model.is_known for model in self._models)
        return self._world_size > 1 and not is_known

    @property
    def fastest(self) -> int:
        """The rank that is expected to be the fastest, by the hints or by what was measured before a resume."""
        speeds = self._hints or self.own_rates or (1.0,) * self._world_size
        return speeds.index(max(speeds))

    def expect_gains(self, gains: Sequence[float]) -> None:
        """Expect each rank to be so many times as fast while the others rest and leave it their cores."""
        self._alone.gains = tuple(gains)

    def hint(self, speeds: Sequence[float]) -> None:
        """Split the first batches by speeds that were measured, not given by the user."""
        self._hints = proportions("speeds", speeds, world_size=self._world_size)
        self._hinted_by = f"by a short measurement of the devices: {', '.join(f'{speed:.2f}' for speed in speeds)}"

    def begin(self, total: int, *, left: int | None) -> list[Decision]:
        """Before the first step, of `total` samples: decide whether the fastest rank begins alone.

        `left` is the number of samples until the end of the run, if known.
        """
        if self._num_steps or self.lone is not None or not self._may_begin_alone or self._hints is None or left is None:
            return []
        if self._help > SMALL_HELP:
            return []
        self._usual = self._made(total)
        fastest = max(speeds := self._speeds_alone)
        rank = speeds.index(fastest)
        if not self._alone.begin(rank, slowness=fastest / min(self._hints), steps_left=left / total):
            return []
        helps = self._help_in_words(f"the speed of rank {rank}")
        return [Decision("alone", rank, f"the others together {helps}, which begins alone")]

    @property
    def _speeds_alone(self) -> tuple[float, ...]:
        """The hinted speed of each rank while the others rest."""
        return self._alone.gained(self._hints or ())

    @property
    def _help(self) -> float:
        """What sharing may add to the fastest rank alone, as a part of its speed, by the hints."""
        return max(0.0, sum(self._hints or ()) / max(self._speeds_alone) - 1)

    def _help_in_words(self, speed: str) -> str:
        has_gains = max(self._alone.gains, default=1.0) > 1
        return f"add {self._help:.2g} to {speed} with all cores" if has_gains else f"have {self._help:.2g} of {speed}"

    def learn(self, report: AverageReport, *, left: int | None = None) -> list[Decision]:
        """Learn from one step's times; returns a decision when the split changes for good.

        `left` is the number of samples until the end of the run, if known.
        """
        self._num_steps += 1
        if self._before_staying is not None:
            return self._shared_once_more(self._before_staying, report)
        is_first, self._has_shared = not self._has_shared, True
        if is_first or self._shares is not None:
            # The first step carries the warm-up of every device.
            return []
        if not report.samples:
            # A device reports a step with the next one, and what was left at the end of an epoch went with its merge.
            return []
        has_shifted = False
        for model, facts in zip(self._models, report.ranks, strict=True):
            if facts.samples and facts.compute_ms > 0:
                has_shifted |= model.observe(facts.samples, facts.compute_ms)
        if self.lone is not None:
            # This step was in progress when a rank went alone: keep the times that the rank was compared with.
            return []
        if self._may_rest:
            self._alone.spent(report)
            if report.samples == self.usual_samples:
                self._alone.bound(report)
        if not _is_steady(report):
            # A rank met a new shape: the time of such a step does not tell its speed.
            return []
        if self._alone.compares_wholes:
            return self._judge_whole(report, left)
        if self._exploring_left and self._may_rest:
            steps_left = None if left is None else left / report.samples
            reason = self._alone.shared_at_first(report, steps_left=steps_left)
            if reason is not None:
                for model in self._models:
                    model.fit()
                return self._goes_alone(reason)
        if self._exploring_left and self._usual is not None and _samples(report) != self._usual.samples:
            # Splits are decided a few steps early; each one is tried in turn, and this step still has an earlier one.
            return []
        if self._exploring_left or has_shifted or self._num_steps % REFIT_EVERY == 0:
            decisions = self._refit()
            if decisions:
                return decisions
        return self._judge_sharing(report, left)

    def learn_alone(self, report: AverageReport, *, left: int | None = None) -> list[Decision]:
        """Learn from a stretch of one rank alone; returns a decision when another rank takes over or all share again.

        `left` is the number of samples until the end of the run, if known.
        """
        self._num_steps += max(facts.batches for facts in report.ranks)
        lone = self.lone
        assert self._usual is not None
        assert lone is not None
        facts = report.ranks[lone]
        is_usual = facts.samples == facts.batches * self._usual.total
        steps_left = None if left is None else left / self._usual.total
        reason = self._alone.alone(report, is_usual=is_usual, steps_left=steps_left)
        if reason is None:
            return []
        if self.lone is not None:
            return [Decision("alone", self.lone, reason)]
        self._alone.forget()
        decision = Decision("alone", None, reason)
        if self._alone.lasted < TIMES_HOLD:
            return [decision]
        return [decision, *self._explore_anew()]

    def _judge_sharing(self, report: AverageReport, left: int | None) -> list[Decision]:
        if self._exploring_left or report.samples != self.usual_samples:
            return []
        if not self._may_rest:
            self._alone.measure(report)
            return []
        steps_left = None if left is None else left / report.samples
        reason = self._alone.shared(report, self._costs(), report.samples, steps_left=steps_left)
        if self._alone.compares_wholes:
            self._usual = self._made(report.samples)
        return [] if reason is None else self._goes_alone(reason)

    def _judge_whole(self, report: AverageReport, left: int | None) -> list[Decision]:
        assert self._only_alone is not None
        if report.samples != self.usual_samples or report.ranks[self._only_alone].samples != report.samples:
            # A short batch, or a split that was decided before.
            return []
        reason = self._alone.whole(report, steps_left=None if left is None else left / report.samples)
        if not self._alone.compares_wholes:
            self._usual = self._made(report.samples)
        return [] if reason is None else self._goes_alone(reason)

    def _shared_once_more(self, why: str, report: AverageReport) -> list[Decision]:
        """After one more shared step, in which local steps might have been chosen instead."""
        if report.ends_segment:
            return []
        self._before_staying = None
        return [Decision("alone", self.lone, why)]

    def _goes_alone(self, reason: str) -> list[Decision]:
        if not self._alone.stays:
            return [Decision("alone", self.lone, reason)]
        self._before_staying = reason
        return []

    @property
    def usual_samples(self) -> int:
        """Samples of a usual batch; 0 before the first."""
        return 0 if self._usual is None else self._usual.total

    @property
    def exact_rate(self) -> float | None:
        """Samples per ms in the current mode, shared or one rank alone; None until that is measured."""
        is_early = self._exploring_left and self.lone is None and self.soon_alone is None
        step_ms = None if is_early else self._alone.step_ms
        return None if self._usual is None or not step_ms else self._usual.total / step_ms

    @property
    def unshared_reason(self) -> str | None:
        """Why one rank works alone whatever sharing would bring; None if both were or will be compared."""
        if self._follows_local and self.lone is not None:
            fastest = self.lone if self._hints is None else self._hints.index(max(self._hints))
            advice = "" if fastest == self.lone else f"; name the device of rank {fastest} first, it is faster"
            return (
                f"rank {self.lone} works alone: loops that trained on batches of their own share no steps again{advice}"
            )
        if not self._alone.is_unshared or self._hints is None:
            return None
        helps = self._help_in_words("its speed")
        return f"rank {self.lone} works alone: the run is too short to try the others, which together {helps}"

    @property
    def own_rates(self) -> tuple[float, ...] | None:
        """Samples per ms of each rank if it took whole batches beside the others, by the fitted times."""
        if self._usual is None or not any(model.is_known for model in self._models):
            return None
        total = self._usual.total
        rates = [total / (cost.fixed_ms + cost.per_sample_ms * total) for cost in self._costs()]
        if self.lone is not None and self.exact_rate is not None:
            # Measured on whole batches, without other ranks computing at the same time.
            rates[self.lone] = self.exact_rate / self._alone.gain(self.lone)
        return tuple(rates)

    @property
    def rates_alone(self) -> tuple[float, ...] | None:
        """Samples per ms of each rank while the others rest and leave it their cores.

        Times fitted to few steps may be far off; until a rank was measured often, or alone, it counts as no faster,
        beside the fastest, than by the hints.
        """
        if self.own_rates is None:
            return None
        rates = self._alone.gained(self.own_rates)
        if self._hints is None:
            return rates
        hinted = self._alone.gained(self._hints)
        unit = rates[hinted.index(max(hinted))] / max(hinted)
        limits = [
            math.inf if rank == self.lone or model.num_observed >= REFIT_EVERY else unit * hint
            for rank, (hint, model) in enumerate(zip(hinted, self._models, strict=True))
        ]
        return tuple(map(min, rates, limits))

    def share(self, rank: int) -> float:
        """The rank's part of a batch; before the first one it follows the options or is equal."""
        if self.lone is not None:
            return 1.0 if rank == self.lone else 0.0
        if self._usual is not None and self._usual.total:
            return self._usual.samples[rank] / self._usual.total
        given = self._shares or self._hints
        return given[rank] if given else 1 / self._world_size

    def state(self) -> dict[str, Any]:
        # A comparison with whole batches begins anew after a resume.
        split = None if self._alone.compares_wholes else self._usual
        return {
            "models": [model.state() for model in self._models],
            "num_steps": self._num_steps,
            "has_shared": self._has_shared,
            "exploring_left": self._exploring_left,
            "decided": self._decided and list(self._decided),
            "split": split and {"samples": list(split.samples), "reason": split.reason},
            "alone": self._alone.state(),
            "before_staying": self._before_staying,
            "follows_local": self._follows_local,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what was learned; options given for this run take precedence."""
        if len(state["models"]) != self._world_size:
            raise ConfigError(
                f"the saved splitter has {len(state['models'])} ranks, got world_size={self._world_size}",
                hint="resume with the same number of devices",
            )
        self._models = [TimeModel.restored(entry) for entry in state["models"]]
        self._num_steps = state["num_steps"]
        self._has_shared = state.get("has_shared", self._num_steps > 0)
        self._exploring_left = state["exploring_left"]
        self._decided = state["decided"] and tuple(state["decided"])
        split = state["split"]
        self._usual = split and Split(samples=tuple(split["samples"]), reason=split["reason"])
        alone = state.get("alone")
        if alone is not None and (alone["rank"] is None or self.may_work_alone(alone["rank"])):
            self._alone.restore(alone)
            self._before_staying = state.get("before_staying")
            self._follows_local = state.get("follows_local", False)

    def _refit(self) -> list[Decision]:
        for model in self._models:
            model.fit()
        if self._usual is None or not any(model.is_known for model in self._models):
            return []
        if self._exploring_left:
            return self._explore()
        if 0 in self._usual.samples and self._num_steps % TIMES_HOLD == 0:
            return self._explore_anew()
        best = self._best(self._usual.total)
        now_ms, best_ms = slowest_ms(self._costs(), self._usual.samples), slowest_ms(self._costs(), best)
        return self._adopt(best) if best_ms < (1 - DEAD_ZONE) * now_ms else []

    def _explore_anew(self) -> list[Decision]:
        self._exploring_left = EXPLORING_STEPS + 1
        self._explored.clear()
        return self._explore()

    def _explore(self) -> list[Decision]:
        assert self._usual is not None
        total = self._usual.total
        self._exploring_left -= 1
        if self._exploring_left == 0:
            return self._adopt(self._best(total))
        self._usual = self._made(total)
        return []

    def _adopt(self, samples: tuple[int, ...]) -> list[Decision]:
        reason = f"slowest rank takes {slowest_ms(self._costs(), samples):.2f} ms by the fitted times"
        self._usual = Split(samples=samples, reason=reason)
        self._alone.forget()
        before, self._decided = self._decided, samples
        if samples == before:
            return []
        return [Decision("split", samples, reason, {"from": before, "to": samples})]

    def _made(self, total: int) -> Split:
        drafted = self._drafted(total)
        return replace(drafted, samples=without_singles(drafted.samples, self._caps))

    def _drafted(self, total: int) -> Split:
        if self._shares is not None:
            return Split(samples=self._in_proportion(total, self._shares), reason="shares as given")
        if not any(model.is_known for model in self._models):
            parts = self._hints or (1.0,) * self._world_size
            reason = self._hinted_by if self._hints else "even: nothing measured yet"
            return Split(samples=self._in_proportion(total, parts), reason=reason)
        if self._exploring_left:
            return Split(samples=self._varied(total), reason="sizes varied to tell fixed from per-sample cost")
        if self._alone.compares_wholes:
            whole = tuple(total if rank == self._only_alone else 0 for rank in range(self._world_size))
            return Split(samples=whole, reason=f"whole batches on rank {self._only_alone}, to compare with sharing")
        return Split(samples=self._best(total), reason="by the fitted times")

    def _best(self, total: int) -> tuple[int, ...]:
        return without_singles(minimise_slowest(self._costs(), total, self._caps), self._caps)

    def _varied(self, total: int) -> tuple[int, ...]:
        """The best split with alternate ranks a quarter up and the rest a quarter down; they swap at each step.

        Only two splits alternate: a GPU captures each size anew, and two distant sizes tell as much as many.
        """
        is_odd = self._exploring_left % 2 == 1
        if (total, is_odd) in self._explored:
            return self._explored[total, is_odd]
        signs = [1 if (rank + is_odd) % 2 else -1 for rank in range(self._world_size)]
        # At least four, so that a rank without samples is measured again and a quarter less is still no single sample.
        base = [max(4, count) for count in self._best(total)]
        parts = [count * (1 + sign * EXPLORING_PART) for count, sign in zip(base, signs, strict=True)]
        self._explored[total, is_odd] = self._in_proportion(total, parts)
        return self._explored[total, is_odd]

    def _in_proportion(self, total: int, parts: Sequence[float]) -> tuple[int, ...]:
        return minimise_slowest([GivenCost(0.0, 1 / part) for part in parts], total, self._caps)

    def _costs(self) -> Sequence[Cost]:
        """The fitted times; a rank that never had a sample is assumed to be average."""
        known = [model for model in self._models if model.is_known]
        if len(known) == self._world_size:
            return self._models
        typical = GivenCost(fmean(model.fixed_ms for model in known), fmean(model.per_sample_ms for model in known))
        return [model if model.is_known else typical for model in self._models]


def _samples(report: AverageReport) -> tuple[int, ...]:
    return tuple(facts.samples for facts in report.ranks)


def _is_steady(report: AverageReport) -> bool:
    return not any(facts.setup_ms for facts in report.ranks)


def _checked_caps(caps: Caps | None, world_size: int) -> tuple[int | None, ...] | None:
    if caps is None:
        return None
    if len(caps) != world_size or any(cap is not None and cap < 0 for cap in caps):
        listed = ", ".join("none" if cap is None else str(cap) for cap in caps)
        raise ConfigError(
            f"caps must be one number >= 0 or none per rank, got {listed} for world_size={world_size}",
            hint="leave caps out where memory does not bind",
        )
    return tuple(caps)
