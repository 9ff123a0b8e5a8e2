"""Miles' parallel state for a group of processes of which one axis is split."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch.distributed as dist


def set_state(axis: str = "none") -> Any:
    """axis: `tp` or `cp` spans all processes; every other group has this one alone."""
    from miles.backends.training_utils import parallel

    # From its place among the fields, since the class of groups has moved between versions.
    group_info = getattr(parallel, "GroupInfo", None)
    if group_info is None:
        from miles.utils.ft_utils.process_group_utils import GroupInfo as group_info
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = None
    for member in range(size):  # every process must take part in making every group
        one = dist.new_group([member])
        alone = one if member == rank else alone
    single, whole = group_info(0, 1, alone), group_info(rank, size, dist.group.WORLD)
    split = {"tp": {"tp"}, "cp": {"cp", "intra_dp_cp"}, "none": set()}[axis]
    known = {field.name for field in fields(parallel.ParallelState)}
    names = known & {"intra_dp", "intra_dp_cp", "cp", "tp", "pp", "ep", "etp", "indep_dp"}
    state = parallel.ParallelState(**{name: whole if name in split else single for name in names})
    parallel.set_parallel_state(state)
    return state
