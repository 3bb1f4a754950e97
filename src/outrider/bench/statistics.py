"""What repeated measurements allow to be said: intervals, differences, and equivalence within a margin.

Decides the arithmetic, with the standard library alone; which claims are made of it is the report's business.
Called by the summaries of runs, the report and the comparison with a baseline.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
NUM_RESAMPLES = 2_000
_CONVERGED = 1e-14
_MAX_TERMS = 500


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
    """The larger of the two tests': small where the difference lies within the margin on both sides."""

    @property
    def is_shown(self) -> bool:
        return self.p_value < 1 - CONFIDENCE


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def variance(values: Sequence[float]) -> float:
    """Of the population that the values were drawn from; needs two of them."""
    middle = mean(values)
    return math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1)


def student_interval(values: Sequence[float], *, confidence: float = CONFIDENCE) -> Interval | None:
    """Of the mean; None where fewer than two values say nothing about their spread."""
    if len(values) < 2:
        return None
    half = t_quantile((1 + confidence) / 2, len(values) - 1) * math.sqrt(variance(values) / len(values))
    return Interval(low=mean(values) - half, high=mean(values) + half)


def difference_interval(
    first: Sequence[float], second: Sequence[float], *, confidence: float = CONFIDENCE
) -> Interval | None:
    """Of the difference of two means, by Welch: the spreads may be unlike; None where one is not known."""
    if len(first) < 2 or len(second) < 2:
        return None
    error, freedom = _welch(first, second)
    half = t_quantile((1 + confidence) / 2, freedom) * error
    middle = mean(first) - mean(second)
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
    """How likely a lead as large as this one is where there is none."""
    if error == 0.0:
        return 0.0 if lead > 0 else 1.0
    return 1.0 - t_cdf(lead / error, freedom)


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

    None where a sample has fewer than two values: drawing one value again shows no spread.
    """
    if any(len(group) < 2 for group in groups):
        return None
    draw = random.Random(seed)
    drawn = sorted(statistic([draw.choices(group, k=len(group)) for group in groups]) for _ in range(NUM_RESAMPLES))
    tail = (1 - confidence) / 2
    return Interval(low=_quantile(drawn, tail), high=_quantile(drawn, 1 - tail))


def _quantile(ordered: Sequence[float], part: float) -> float:
    """Between the two nearest values, in proportion."""
    place = part * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


# Student's distribution


def t_cdf(value: float, freedom: float) -> float:
    """How much of Student's distribution lies below the value."""
    tail = 0.5 * incomplete_beta(freedom / 2, 0.5, freedom / (freedom + value * value))
    return 1.0 - tail if value > 0 else tail


def t_quantile(part: float, freedom: float) -> float:
    """The value below which that part of Student's distribution lies, by halving."""
    if part < 0.5:
        return -t_quantile(1.0 - part, freedom)
    low, high = 0.0, 1.0
    while t_cdf(high, freedom) < part:
        low, high = high, 2.0 * high
    while high - low > _CONVERGED * max(1.0, high):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        low, high = (middle, high) if t_cdf(middle, freedom) < part else (low, middle)
    return 0.5 * (low + high)


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by its continued fraction where that converges quickly."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1.0) / (a + b + 2.0):
        return 1.0 - incomplete_beta(b, a, 1.0 - x)
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(scale) * _beta_fraction(a, b, x) / a


def _beta_fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function, from its front (Lentz)."""
    tiny = 1e-300
    denominator = _away_from_zero(1.0 - (a + b) * x / (a + 1.0), tiny)
    numerator, denominator = 1.0, 1.0 / denominator
    value = denominator
    for term in range(1, _MAX_TERMS):
        for factor in _beta_factors(a, b, x, term):
            denominator = 1.0 / _away_from_zero(1.0 + factor * denominator, tiny)
            numerator = _away_from_zero(1.0 + factor / numerator, tiny)
            value *= numerator * denominator
        if abs(numerator * denominator - 1.0) < _CONVERGED:
            break
    return value


def _beta_factors(a: float, b: float, x: float, term: int) -> tuple[float, float]:
    even = term * (b - term) * x / ((a + 2 * term - 1) * (a + 2 * term))
    odd = -(a + term) * (a + b + term) * x / ((a + 2 * term) * (a + 2 * term + 1))
    return even, odd


def _away_from_zero(value: float, tiny: float) -> float:
    return tiny if abs(value) < tiny else value
