"""Intervals against known values and against what they promise, with a control that must fail."""

import math

import numpy as np
import pytest

from experiments.statistics import Estimate, estimate, paired


def test_students_interval_is_the_textbooks():
    found = estimate([1.0, 2.0, 3.0])
    half = 4.302652729911275 / math.sqrt(3)  # the 0.975 quantile of t with 2 degrees of freedom, standard deviation 1
    assert found.mean == 2 and found.t_low == pytest.approx(2 - half) and found.t_high == pytest.approx(2 + half)
    assert 1 <= found.low < 2 < found.high <= 3, "resampling three values stays within them"


def test_intervals_cover_as_they_promise_and_the_bootstrap_of_three_does_not():
    rng = np.random.default_rng(5)
    drawn = [estimate(rng.normal(1, 2, 12).tolist()) for _ in range(200)]
    covered = np.mean([one.t_low <= 1 <= one.t_high for one in drawn])
    assert 0.9 <= covered <= 0.99 and np.mean([one.low <= 1 <= one.high for one in drawn]) >= 0.85
    few = [estimate(rng.normal(1, 2, 3).tolist()) for _ in range(200)]
    assert np.mean([one.t_low <= 1 <= one.t_high for one in few]) >= 0.9
    assert np.mean([one.low <= 1 <= one.high for one in few]) < 0.85, "which is why Student's interval is beside it"


def test_differences_are_taken_seed_by_seed():
    treated, control = {0: 10.1, 1: 20.1, 2: 30.1, 7: 5.0}, {0: 10.0, 1: 20.0, 2: 30.0, 8: 1.0}
    found = paired(treated, control)
    assert found and found.count == 3 and found.mean == pytest.approx(0.1) and found.shown == "shown"
    assert paired({1: 1.0}, {2: 1.0}) is None


def test_what_is_shown_needs_both_intervals():
    assert estimate([0.1, 0.2, 0.9]).shown == "weak", "the bootstrap alone"
    assert estimate([-0.1, 0.2, 0.9]).shown == "not shown"
    assert estimate([-0.5, -0.52, -0.48]).shown == "shown"
    one = estimate([3.0])
    assert one.count == 1 and math.isnan(one.low) and one.shown == "not shown"
    assert estimate([0.0, 0.0]) == Estimate(2, 0.0, 0.0, 0.0, 0.0, 0.0) and estimate([0.0, 0.0]).shown == "not shown"


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_values_that_are_none_or_not_finite_are_refused(values):
    with pytest.raises(ValueError, match="finite number a seed"):
        estimate(values)
