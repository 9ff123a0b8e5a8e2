"""The capability in `internal_states`: what every rank of this worker loaded, under the key `sc`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from typing import Any, cast

from miles_ext.capability import EngineCapability
from miles_ext.sampling import FilterOrder
from miles_ext.sglang_plugin import PLUGIN_VERSION, guard
from miles_ext.sglang_plugin.sabotage import SABOTAGE_VARIABLE
from miles_ext.sglang_plugin.settings import read_settings
from miles_ext.sglang_plugin.weights import refreshed
from miles_ext.sglang_plugin.worker import inspect_worker

STATE_KEY = "sc"


def after_add_speculative(_result: None, controller: Any, state: dict[str, Any]) -> None:
    """Every rank runs this for the same request; the first rank's answer carries all of them."""
    mine = to_json(capability_of(controller.scheduler))
    state[STATE_KEY] = {"ranks": _gather(mine)}


def capability_of(scheduler: Any) -> EngineCapability:
    from sglang.srt.runtime_context import get_parallel, get_serving

    facts, proof = inspect_worker(scheduler), refreshed(scheduler)
    version = str(get_serving().weight_version)
    sabotage = (SABOTAGE_VARIABLE,) if os.environ.get(SABOTAGE_VARIABLE) else ()
    return EngineCapability(
        engine="sglang",
        engine_version=metadata.version("sglang"),
        arm=facts.arm,
        verifier=facts.verifier,
        verifier_impl="production" if facts.verifier_impl == "production" else "test",
        dflash_sampling_verify_available=facts.sampling_verify_available and facts.verifier != "none",
        accept_threshold_single=facts.accept_threshold_single,
        accept_threshold_acc=facts.accept_threshold_acc,
        filter_orders=(facts.filter_order,),
        max_support=facts.max_support,
        plugin_version=PLUGIN_VERSION,
        patches=guard.in_force(),
        environment=facts.blockers + sabotage,
        vocab_size=facts.vocab_size,
        weight_version=int(version) if version.isdecimal() else -1,
        resident_digest=proof.resident,
        draft_digest=proof.draft,
        engine_id=read_settings().engine_id,
        rank=int(get_parallel().tp_rank),
        extra={
            "received_digest": proof.ledger.digest,
            "strict": str(read_settings().strict),
            "complaints": "; ".join(guard.complaints()),
        },
    )


def to_json(capability: EngineCapability) -> dict[str, Any]:
    return {**asdict(capability), "patches": sorted(capability.patches)}


def from_json(message: Mapping[str, Any]) -> EngineCapability:
    """Inverse of `to_json`. Raises TypeError for a field that is missing or unknown."""
    fields = dict(message)
    orders = cast(tuple[FilterOrder, ...], tuple(fields.pop("filter_orders")))
    patches, environment = frozenset(fields.pop("patches")), tuple(fields.pop("environment"))
    return EngineCapability(**fields, filter_orders=orders, patches=patches, environment=environment)


def _gather(mine: dict[str, Any]) -> list[dict[str, Any]]:
    import torch.distributed as dist
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().tp_size == 1:
        return [mine]
    ranks: list[Any] = [None] * get_parallel().tp_size
    dist.all_gather_object(ranks, mine, group=get_parallel().tp_group.cpu_group)
    return ranks
