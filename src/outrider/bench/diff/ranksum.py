"""Decides whether one set of timings differs from another: the rank-sum test of Mann and Whitney, and its effect size.

Does not decide what is worth telling, reads no file and needs no numpy. Called by the diff of two benchmarks.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import NormalDist, fmean

from outrider.bench.statistics import t_cdf

# Up to here every way to deal the ranks out is counted, ties included; beyond, the normal curve is close enough.
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
        """Cliff's delta in words, with the limits of Romano et al. 2006."""
        size = abs(self.cliffs_delta)
        return "negligible" if size < 0.147 else "small" if size < 0.33 else "medium" if size < 0.474 else "large"


def rank_sum(first: Groups, second: Groups) -> RankSum:
    """Compare two sets of timings.

    Timings of one group are more alike than of two: what the groups of a set differ among themselves is how far chance
    alone can part two sets, however many timings there are. With one timing per group this is the classical test.
    """
    flat = [time for groups in (first, second) for group in groups for time in group]
    num_first = sum(map(len, first))
    ranks = midranks(flat)
    mean_first, mean_second = fmean(ranks[:num_first]), fmean(ranks[num_first:])
    quicker_part = (mean_first - (num_first + 1) / 2) / (len(flat) - num_first)
    if max(map(len, (*first, *second))) > 1:
        p_value, method = _grouped(ranks, first, second), "groups"
    elif len(flat) <= EXACT_MOST:
        p_value, method = _exact(ranks, num_first), "exact"
    else:
        p_value, method = _normal(ranks, num_first, mean_first - mean_second), "normal"
    return RankSum(p_value=p_value, method=method, quicker_part=quicker_part)


def midranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1 in the order given; equal values share the mean of theirs."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 1
    for _, tied in groupby(order, key=values.__getitem__):
        members = list(tied)
        for member in members:
            ranks[member] = start + (len(members) - 1) / 2
        start += len(members)
    return ranks


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


def _normal(ranks: Sequence[float], num_first: int, difference: float) -> float:
    variance = _chance_variance(ranks, num_first)
    if variance == 0:
        return 1.0
    # Ranks come in whole steps: half a step less is what the curve leaves out.
    step = 0.5 * len(ranks) / (num_first * (len(ranks) - num_first))
    return 2 * NormalDist().cdf(-max(0.0, abs(difference) - step) / math.sqrt(variance))


def _grouped(ranks: Sequence[float], first: Groups, second: Groups) -> float:
    """Student's t on the mean ranks of groups, with no less variance than the classical test takes chance to have."""
    num_first = sum(map(len, first))
    means_first, means_second = _group_means(ranks[:num_first], first), _group_means(ranks[num_first:], second)
    degrees = len(first) + len(second) - 2
    if degrees < 1:
        return 1.0
    variance = max(_chance_variance(ranks, num_first), _spread(means_first) + _spread(means_second))
    if variance == 0:
        return 1.0
    return 2 * t_cdf(-abs(fmean(means_first) - fmean(means_second)) / math.sqrt(variance), degrees)


def _chance_variance(ranks: Sequence[float], num_first: int) -> float:
    """Of the difference of mean ranks where all orders are equally likely; ties narrow it."""
    num_all = len(ranks)
    ties: defaultdict[float, int] = defaultdict(int)
    for rank in ranks:
        ties[rank] += 1
    tied = sum(count**3 - count for count in ties.values())
    whole = num_all * (num_all + 1) / 12 - tied / (12 * (num_all - 1))
    return whole * (1 / num_first + 1 / (num_all - num_first))


def _group_means(ranks: Sequence[float], groups: Groups) -> list[float]:
    means, start = [], 0
    for group in groups:
        means.append(fmean(ranks[start : start + len(group)]))
        start += len(group)
    return means


def _spread(means: Sequence[float]) -> float:
    """The variance of their mean; one alone shows none."""
    if len(means) < 2:
        return 0.0
    centre = fmean(means)
    return sum((mean - centre) ** 2 for mean in means) / (len(means) - 1) / len(means)
