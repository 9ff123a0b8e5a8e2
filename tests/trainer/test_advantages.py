import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.advantages import advantages

REWARDS = [1.0, 0.0, 0.5, 2.0, 2.0, -1.0]
GROUPS = [7, 3, 7, 3, 3, 9]


def test_raw_subtracts_the_baseline():
    assert advantages(REWARDS, GROUPS, "raw", baseline=0.5).tolist() == [0.5, -0.5, 0.0, 1.5, 1.5, -1.5]


def test_group_and_leave_one_out_against_the_definitions():
    rewards, groups = np.array(REWARDS), np.array(GROUPS)
    mean, scaled, others = [], [], []
    for index, group in enumerate(GROUPS):
        mates = rewards[groups == group]
        rest = rewards[(groups == group) & (np.arange(len(rewards)) != index)]
        alone = len(rest) == 0
        mean.append(rewards[index] - mates.mean())
        scaled.append(0 if alone else mean[-1] / (mates.std(ddof=1) + 1e-4))
        others.append(0 if alone else rewards[index] - rest.mean())
    assert np.allclose(advantages(REWARDS, GROUPS, "group", std=False), mean, rtol=0, atol=1e-15)
    assert np.allclose(advantages(REWARDS, GROUPS, "group"), scaled, rtol=1e-14, atol=0)
    assert np.allclose(advantages(REWARDS, GROUPS, "leave_one_out"), others, rtol=0, atol=1e-15)


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 3)), min_size=2, max_size=20), st.randoms())
def test_advantages_do_not_depend_on_order_and_sum_to_zero(rows, random):
    rows = [*rows, (1.0, 0), (0.0, 0)]
    shuffled = rows.copy()
    random.shuffle(shuffled)
    for kind in ("group", "leave_one_out"):
        found, again = (advantages([r for r, _ in part], [g for _, g in part], kind) for part in (rows, shuffled))
        assert np.allclose(sorted(found), sorted(again), atol=1e-9)
        assert abs(found.sum()) < 1e-7 * len(rows)


def test_equal_rewards_carry_no_signal():
    assert np.abs(advantages([0.1] * 8, [0] * 8, "group")).max() < 1e-11


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_rewards_are_named(bad):
    with pytest.raises(ValueError, match=r"trajectory 1 \(group 3\)"):
        advantages([0.0, bad, 1.0], [3, 3, 3], "group")


def test_groups_of_one_everywhere_are_refused_where_they_mean_nothing():
    for kind in ("group", "leave_one_out"):
        with pytest.raises(ValueError, match="more than once"):
            advantages([0.0, 1.0], [0, 1], kind)
    assert advantages([0.0, 1.0], [0, 1], "raw").tolist() == [0.0, 1.0]


def test_unknown_kinds_and_lengths_are_refused():
    with pytest.raises(ValueError, match="accepted: raw, group, leave_one_out"):
        advantages([0.0], [0], "best")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="one of each"):
        advantages([0.0, 1.0], [0], "raw")
