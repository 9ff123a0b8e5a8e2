"""What a few seeds say: differences seed by seed, with two intervals each (scipy)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

LEVEL = 0.95
RESAMPLES = 9999
ROUNDING = 1e-6

Shown = Literal["shown", "weak", "not shown"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over `count` seeds and its 95 % intervals: percentile bootstrap [low, high] and Student's [t_low, t_high].

    NaN where there are too few seeds for an interval. With three seeds the bootstrap cannot leave the range of the
    three values and is too narrow; Student's interval, which assumes normal seeds, is the honest one there.
    """

    count: int
    mean: float
    low: float
    high: float
    t_low: float
    t_high: float

    @property
    def shown(self) -> Shown:
        """Whether zero is outside both intervals, outside the bootstrap alone (`weak`), or inside.

        A mean below ROUNDING shows nothing: laws are recorded in float32.
        """
        if abs(self.mean) < ROUNDING or not (self.low > 0 or self.high < 0):
            return "not shown"
        return "shown" if self.t_low > 0 or self.t_high < 0 else "weak"


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and intervals of one number a seed. ValueError where there is none or one is not finite."""
    found = np.asarray(values, float)
    if not len(found) or not np.isfinite(found).all():
        raise ValueError(f"values {found.tolist()}; accepted: one finite number a seed, at least one")
    mean = float(found.mean())
    if len(found) == 1:
        return Estimate(1, mean, math.nan, math.nan, math.nan, math.nan)
    if np.ptp(found) == 0:  # every seed says the same: there is nothing to resample
        return Estimate(len(found), mean, mean, mean, mean, mean)
    drawn = stats.bootstrap(
        (found,), np.mean, confidence_level=LEVEL, n_resamples=RESAMPLES, method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    low, high = stats.t.interval(LEVEL, len(found) - 1, loc=mean, scale=stats.sem(found))
    return Estimate(len(found), mean, float(drawn.low), float(drawn.high), float(low), float(high))


def paired(treated: Mapping[int, float], control: Mapping[int, float]) -> Estimate | None:
    """treated - control over the seeds that both have (the keys); None where there is none."""
    seeds = sorted(treated.keys() & control.keys())
    return estimate([treated[seed] - control[seed] for seed in seeds]) if seeds else None
