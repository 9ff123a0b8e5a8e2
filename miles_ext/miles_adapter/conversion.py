"""From samples to training data, and through the split between data-parallel ranks, which keeps known fields only.

Miles gives a conversion hook neither its rollout manager nor what it knows of the batch, and Ray ships the manager's
class by value, so that nothing patched in a module reaches its methods. The hook therefore asks its caller's frame for
the conversion that it replaces.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Sequence
from functools import wraps
from types import FrameType
from typing import Any

from miles.utils.types import Sample

from miles_ext.errors import CapabilityError, SupportError
from miles_ext.miles_adapter import samples
from miles_ext.miles_adapter.arguments import spec_of
from miles_ext.miles_adapter.samples import ATTRIBUTE
from miles_ext.miles_adapter.versions import CONVERSION, resolve, version

SPLIT = "_split_train_data_by_dp"
MANAGER = {"_convert_samples_to_train_data": "samples", SPLIT: "data, dp_size"}


def convert(args: Namespace, batch: Sequence[Sample]) -> dict[str, Any]:
    """--custom-convert-samples-to-train-data-path: Miles' own conversion, and the rows of each sample under `sc_rows`.

    Raises SupportError naming the sample without rows, with rows of another response, or of another law.
    """
    spec = spec_of(args)
    rows = []
    for sample in batch:
        found = samples.rows_of(sample)
        where = f"sample {sample.index} of group {sample.group_index}"
        if found is None:
            raise SupportError(
                f"{where} ({sample.status.value}, {sample.response_length} tokens) has no support rows; every sample "
                "must come from miles_ext.miles_adapter.rollout.RolloutFn"
            )
        rows.append(found.require(sample.tokens[len(sample.tokens) - sample.response_length :], spec, where))
    frame = inspect.currentframe()
    caller = frame.f_back if frame is not None else None
    return {**_own_conversion(args, batch, caller), ATTRIBUTE: rows}


def _own_conversion(args: Namespace, batch: Sequence[Sample], caller: FrameType | None) -> dict[str, Any]:
    known = {} if caller is None else caller.f_locals
    if version("rollout").module_functions:
        wanted = ("metadata", "custom_reward_post_process_func")
        if not all(name in known for name in wanted):
            raise CapabilityError("the hook must be called by convert_samples_to_train_data of Miles itself")
        return resolve(f"{CONVERSION}:convert_samples_to_train_data")(
            args, batch, known["metadata"], None, known["custom_reward_post_process_func"]
        )
    manager = require_manager(known.get("self"))
    carry_on(manager)
    hook, manager.custom_convert_samples_to_train_data_func = manager.custom_convert_samples_to_train_data_func, None
    try:
        return manager._convert_samples_to_train_data(batch)
    finally:
        manager.custom_convert_samples_to_train_data_func = hook


def require_manager(manager: Any) -> Any:
    for name, wanted in MANAGER.items():
        method = getattr(manager, name, None)
        names = [] if method is None else [*inspect.signature(method).parameters]
        found = ", ".join(name for name in names if name != "_ray_trace_ctx")  # Ray adds it
        if found != wanted:
            raise CapabilityError(
                f"RolloutManager.{name} takes ({found}), wanted ({wanted}): the hook must be called by the rollout "
                "manager of Miles itself"
            )
    return manager


def carry_on(manager: Any) -> None:
    """Let the split of this manager keep the rows."""
    if SPLIT in vars(manager):
        return
    split = getattr(manager, SPLIT)

    @wraps(split)
    def split_train_data_by_dp(data, dp_size):
        import ray  # only where Ray already runs this

        # Each box holds a reference to a shard that is already in the object store.
        return [type(box)(ray.put(with_rows(ray.get(box.inner), data))) for box in split(data, dp_size)]

    setattr(manager, SPLIT, split_train_data_by_dp)


def with_rows(shard: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """The shard of one rank with the rows of its own samples."""
    return {**shard, ATTRIBUTE: [data[ATTRIBUTE][j] for j in shard["partition"]]} if ATTRIBUTE in data else shard


def carry() -> None:
    """Let the split of the module keep the rows: in the rollout manager, or in the trainer where it is delayed."""
    module = resolve(CONVERSION)
    if getattr(module._package_shards, "sc_carries", False):
        return
    package = module._package_shards

    @wraps(package)
    def package_shards(args, data, partitions):
        return [with_rows(shard, data) for shard in package(args, data, partitions)]

    package_shards.__dict__["sc_carries"] = True
    module._package_shards = package_shards


if version("rollout").module_functions:
    carry()
