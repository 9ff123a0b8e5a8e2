"""Advantages from rewards: one number a trajectory, constant over its tokens."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

AdvantageKind = Literal["raw", "group", "leave_one_out"]
STD_FLOOR = 1e-4


def advantages(
    rewards: ArrayLike, groups: ArrayLike, kind: AdvantageKind, *, baseline: float = 0.0, std: bool = True
) -> NDArray[np.float64]:
    """Float64 [n] from rewards [n] and group ids [n].

    raw: reward - baseline.
    group: reward - mean of its group, over the group's unbiased standard deviation + 1e-4 where `std` (GRPO, Shao et
    al. 2024).
    leave_one_out: reward - mean of the others of its group (RLOO, Ahmadian et al. 2024).

    In the last two a group of one has nothing to be compared with and gets 0; ValueError where every group is of one,
    where a reward is not finite, or where the lengths differ.
    """
    values, ids = np.asarray(rewards, np.float64), np.asarray(groups)
    if kind not in get_args(AdvantageKind):
        raise ValueError(f"advantage is {kind!r}; accepted: {', '.join(get_args(AdvantageKind))}")
    if values.ndim != 1 or values.shape != ids.shape:
        raise ValueError(f"rewards of shape {values.shape} beside groups of shape {ids.shape}; accepted: one of each")
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        first = int(bad[0])
        raise ValueError(
            f"reward of trajectory {first} (group {ids[first]}) is {values[first]}; accepted: finite rewards; "
            "mend the reward function"
        )
    if kind == "raw":
        return values - baseline

    _, member, size = np.unique(ids, return_inverse=True, return_counts=True)
    if len(values) and size.max() == 1:
        raise ValueError(
            f"advantage {kind!r} over groups of one trajectory each has nothing to compare with; "
            "sample a prompt more than once, or use 'raw'"
        )
    others = np.maximum(size - 1, 1)
    centred = values - (np.bincount(member, values) / size)[member]
    if kind == "leave_one_out":
        return centred * (size / others)[member]  # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1)
    if not std:
        return centred
    deviation = np.sqrt(np.bincount(member, centred**2) / others)
    return centred / (deviation + STD_FLOOR)[member]
