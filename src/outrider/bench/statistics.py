"""Statistics of repeated measurements: intervals, differences, equivalence within a margin, the rank-sum test.

Decides which test is used for which question. The distributions come from scipy, which only reports need; measuring
works without it. Called by summaries, the report, and the comparisons with a baseline and of two benchmarks.
"""

from __future__ import annotations

import importlib
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, variance
from typing import Any

import numpy

from outrider.errors import MissingExtraError

CONFIDENCE = 0.95
NUM_RESAMPLES = 2_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A range that holds the true value with the confidence it was made for."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True, slots=True)
class Equivalence:
    """The outcome of two one-sided tests of `first` against `second`."""

    difference: float
    """Mean of the first minus mean of the second."""
    margin: float
    p_value: float
    """The larger p-value of the two tests: small if the difference is within the margin on both sides."""

    @property
    def is_shown(self) -> bool:
        return self.p_value < 1 - CONFIDENCE


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def scipy_stats() -> Any:
    """scipy's distributions and tests, imported on demand."""
    try:
        return importlib.import_module("scipy.stats")
    except ImportError as error:
        raise MissingExtraError(
            "intervals and tests need scipy, which is not installed", hint="pip install 'outrider[bench]'"
        ) from error


def student_interval(values: Sequence[float], *, confidence: float = CONFIDENCE) -> Interval | None:
    """Of the mean; None if fewer than two values say nothing about their spread."""
    if len(values) < 2:
        return None
    return _around(mean(values), math.sqrt(variance(values) / len(values)), len(values) - 1, confidence)


def difference_interval(
    first: Sequence[float], second: Sequence[float], *, confidence: float = CONFIDENCE
) -> Interval | None:
    """Of the difference of two means, by Welch: the spreads may be unlike; None if one is not known."""
    if len(first) < 2 or len(second) < 2:
        return None
    error, freedom = _welch(first, second)
    return _around(mean(first) - mean(second), error, freedom, confidence)


def _around(middle: float, error: float, freedom: float, confidence: float) -> Interval:
    half = float(scipy_stats().t.ppf((1 + confidence) / 2, freedom)) * error
    return Interval(low=middle - half, high=middle + half)


def equivalence(first: Sequence[float], second: Sequence[float], *, margin: float) -> Equivalence | None:
    """Two one-sided Welch tests: is the difference of the means above -margin, and is it below margin?"""
    if len(first) < 2 or len(second) < 2:
        return None
    difference = mean(first) - mean(second)
    error, freedom = _welch(first, second)
    above = _one_sided_p(difference + margin, error, freedom)
    below = _one_sided_p(margin - difference, error, freedom)
    return Equivalence(difference=difference, margin=margin, p_value=max(above, below))


def _one_sided_p(lead: float, error: float, freedom: float) -> float:
    """The probability of a difference as large as this one if there is none."""
    if error == 0.0:
        return 0.0 if lead > 0 else 1.0
    return float(scipy_stats().t.sf(lead / error, freedom))


def _welch(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Standard error of the difference of means, and its degrees of freedom (Welch and Satterthwaite)."""
    parts = [variance(values) / len(values) for values in (first, second)]
    if sum(parts) == 0.0:
        return 0.0, float(len(first) + len(second) - 2)
    spread = sum(part**2 / (len(values) - 1) for part, values in zip(parts, (first, second), strict=True))
    return math.sqrt(sum(parts)), sum(parts) ** 2 / spread


def bootstrap_interval(
    groups: Sequence[Sequence[float]],
    statistic: Callable[[Sequence[Sequence[float]]], float],
    *,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> Interval | None:
    """Of a statistic of several samples, each drawn again from itself; the same for the same seed.

    None if a sample has fewer than two values: drawing one value again shows no spread.
    """
    if any(len(group) < 2 for group in groups):
        return None
    draw = random.Random(seed)
    drawn = [statistic([draw.choices(group, k=len(group)) for group in groups]) for _ in range(NUM_RESAMPLES)]
    tail = (1 - confidence) / 2
    low, high = numpy.quantile(drawn, (tail, 1 - tail))
    return Interval(low=float(low), high=float(high))


# Up to here every way to deal the ranks out is counted, ties included, which scipy's exact test does not know; beyond,
# the normal curve is close enough.
EXACT_MOST = 24

Groups = Sequence[Sequence[float]]
"""Timings in the groups they were taken in: one per round of fresh processes, or per stretch of one process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSum:
    """How the second set of timings stands to the first."""

    p_value: float
    """Two-sided: how often chance alone would part the two at least as far."""
    method: str
    """exact, normal, or groups: widened by what groups of one set differ among themselves."""
    quicker_part: float
    """Of all pairs, the part in which the second is quicker; ties count half."""

    @property
    def cliffs_delta(self) -> float:
        """From -1, every time of the second is longer, to 1, every one is shorter."""
        return 2 * self.quicker_part - 1

    @property
    def effect(self) -> str:
        """A word for the size of Cliff's delta, with the limits of Romano et al. 2006."""
        size = abs(self.cliffs_delta)
        return "negligible" if size < 0.147 else "small" if size < 0.33 else "medium" if size < 0.474 else "large"


def rank_sum(first: Groups, second: Groups) -> RankSum:
    """Compare two sets of timings.

    Timings of one group are more alike than of two: what the groups of a set differ among themselves is how far chance
    alone can part two sets, however many timings there are. With one timing per group this is the classical test.
    """
    flat_first, flat_second = list(chain(*first)), list(chain(*second))
    num_first = len(flat_first)
    ranks = scipy_stats().rankdata(flat_first + flat_second).tolist()
    if max(map(len, (*first, *second))) > 1:
        p_value, method = _grouped(ranks, first, second), "groups"
    elif len(ranks) <= EXACT_MOST:
        p_value, method = _exact(ranks, num_first), "exact"
    else:
        test = scipy_stats().mannwhitneyu(flat_first, flat_second, method="asymptotic")
        p_value, method = float(test.pvalue), "normal"
    quicker_part = (fmean(ranks[:num_first]) - (num_first + 1) / 2) / len(flat_second)
    return RankSum(p_value=p_value, method=method, quicker_part=quicker_part)


def holm(p_values: Sequence[float]) -> list[float]:
    """The same p-values, raised so that a false alarm among all of them stays as rare as in one (Holm 1979)."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for position, index in enumerate(order):
        highest = max(highest, min(1.0, p_values[index] * (len(p_values) - position)))
        adjusted[index] = highest
    return adjusted


def _exact(ranks: Sequence[float], num_first: int) -> float:
    """Of all ways to deal these ranks out, the part that is at least as lopsided; doubled, midranks are whole."""
    doubled = [round(2 * rank) for rank in ranks]
    ways: list[Counter[int]] = [Counter() for _ in range(num_first + 1)]
    ways[0][0] = 1
    for rank in doubled:
        for count in range(num_first, 0, -1):
            for total, number in ways[count - 1].items():
                ways[count][total + rank] += number
    centre = num_first * (len(ranks) + 1)
    distance = abs(sum(doubled[:num_first]) - centre)
    lopsided = sum(number for total, number in ways[num_first].items() if abs(total - centre) >= distance)
    return lopsided / math.comb(len(ranks), num_first)


def _grouped(ranks: Sequence[float], first: Groups, second: Groups) -> float:
    """Student's t on the mean ranks of groups, with no less variance than the classical test takes chance to have."""
    num_first = sum(map(len, first))
    means_first, means_second = _group_means(ranks[:num_first], first), _group_means(ranks[num_first:], second)
    degrees = len(first) + len(second) - 2
    if degrees < 1:
        return 1.0
    chance = max(_chance_variance(ranks, num_first), _spread(means_first) + _spread(means_second))
    if chance == 0:
        return 1.0
    distance = abs(fmean(means_first) - fmean(means_second)) / math.sqrt(chance)
    return 2 * float(scipy_stats().t.sf(distance, degrees))


def _chance_variance(ranks: Sequence[float], num_first: int) -> float:
    """The standard deviation of the difference of mean ranks under the null hypothesis, corrected for ties."""
    num_all = len(ranks)
    whole = scipy_stats().tiecorrect(ranks) * num_all * (num_all + 1) / 12
    return float(whole * (1 / num_first + 1 / (num_all - num_first)))


def _group_means(ranks: Sequence[float], groups: Groups) -> list[float]:
    means, start = [], 0
    for group in groups:
        means.append(fmean(ranks[start : start + len(group)]))
        start += len(group)
    return means


def _spread(means: Sequence[float]) -> float:
    """The variance of their mean; one alone shows none."""
    return variance(means) / len(means) if len(means) > 1 else 0.0
