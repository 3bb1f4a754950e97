"""Estimates the worth of a sample under local steps, relative to a sample of an exact step.

A formula with two constants, fitted to runs in virtual time; docs/results/learning has the runs, the fit and its
errors. Called by the policy chooser.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# An average of N equal ranks moves as far as one of them. So a sample is worth 1/N if progress is limited by distance,
# as with a learning rate below its best or at the end of a falling schedule, and up to 1 if it is limited by noise.
# Windows of one step lose this part of the difference, longer windows more. The constants err on the low side: local
# steps that learn less are worse than local steps that were not tried.
LOST_AT_ONE_STEP = 0.66
LOST_PER_FOLD = 0.04
"""Per natural logarithm of the window."""


def sample_worth(window: float, *, ranks: float) -> float:
    """Worth from 1 / ranks to 1, for `window` steps of the fastest rank between averages of `ranks` effective ranks."""
    lost = LOST_AT_ONE_STEP + LOST_PER_FOLD * math.log(max(1.0, window))
    return 1 - (1 - 1 / max(1.0, ranks)) * min(1.0, lost)


def effective_ranks(rates: Sequence[float]) -> float:
    """The number of equal ranks whose average would move as far: (sum of rates)² / sum of squares."""
    return math.fsum(rates) ** 2 / math.fsum(rate * rate for rate in rates)
