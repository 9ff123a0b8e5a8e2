"""What a batch's rows ask for, on the host: the filters of the law and what to record of it.

Host arrays let the law be built without asking the device anything. A plan is immutable: sglang makes a new one when
the composition of the batch changes, so device copies of row numbers are made once a composition and not once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

OFF, COMPLETE, HEAD = 0, 1, 2
CAPTURES = {"off": OFF, "complete": COMPLETE, "head": HEAD}
REQUEST_KEY = "sc"


@dataclass(frozen=True)
class BatchPlan:
    """One entry a batch row.

    temperature: float64, 0 for a greedy request that records nothing. top_k: int64, sglang's 2**30 being off.
    top_p: float64. capture: OFF, COMPLETE or HEAD. size: head size, or the largest complete support.
    """

    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    capture: NDArray[np.uint8]
    size: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.temperature)

    def take(self, rows: Sequence[int]) -> BatchPlan:
        return BatchPlan(*(getattr(self, name)[list(rows)] for name in _FIELDS))

    def __add__(self, other: BatchPlan) -> BatchPlan:
        return BatchPlan(*(np.concatenate([getattr(self, name), getattr(other, name)]) for name in _FIELDS))

    def repeat(self, times: int) -> tuple[NDArray, NDArray, NDArray]:
        """Temperature, top_k and top_p for `times` consecutive positions of each row."""
        return self.temperature.repeat(times), self.top_k.repeat(times), self.top_p.repeat(times)

    @cached_property
    def captures(self) -> bool:
        return bool(self.capture.any())

    @cached_property
    def device_cache(self) -> dict[Any, Any]:
        """Device copies derived from this plan, kept as long as it lives."""
        return {}


_FIELDS = ("temperature", "top_k", "top_p", "capture", "size")


def plan_of(requests: Sequence[Any]) -> BatchPlan:
    """The plan of sglang requests in batch order."""
    params = [request.sampling_params for request in requests]
    asked = [capture_of(p) for p in params]
    capture = np.array([kind for kind, _ in asked], np.uint8)
    # sglang turns temperature 0 into temperature 1 with top_k 1; that law keeps ties, a greedy request must not.
    greedy = (np.array([p.top_k for p in params]) == 1) & (capture == OFF)
    return BatchPlan(
        temperature=np.where(greedy, 0.0, np.array([p.temperature for p in params], np.float64)),
        top_k=np.array([p.top_k for p in params], np.int64),
        top_p=np.array([p.top_p for p in params], np.float64),
        capture=capture,
        size=np.array([size for _, size in asked], np.int64),
    )


def plan_from_tensors(info: Any) -> BatchPlan:
    """The plan of a sampling info that sglang built without requests (rehearsals at start-up). Waits for the device."""
    n = len(info)
    return BatchPlan(
        temperature=info.temperatures.view(-1).double().cpu().numpy(),
        top_k=info.top_ks.cpu().numpy().astype(np.int64),
        top_p=info.top_ps.double().cpu().numpy(),
        capture=np.zeros(n, np.uint8),
        size=np.zeros(n, np.int64),
    )


def capture_of(params: Any) -> tuple[int, int]:
    """(kind, size) that the request's `custom_params.sc` asks for; OFF for a request without it."""
    asked = (params.custom_params or {}).get(REQUEST_KEY)
    if not isinstance(asked, dict):
        return OFF, 0
    return CAPTURES.get(str(asked.get("capture")), OFF), int(asked.get("k", 0))


def plan_for(info: Any) -> BatchPlan:
    """The plan that travels with a SamplingBatchInfo."""
    plan = getattr(info, "sc_plan", None)
    return plan if plan is not None else plan_from_tensors(info)


# Hooks: the plan follows sglang's own bookkeeping of the batch.


def after_from_schedule_batch(_result: Any, info: Any, batch: Any, _vocab_size: int) -> None:
    info.sc_plan = plan_of(batch.reqs)
    if info.sc_plan.captures:
        # The greedy shortcut takes an argmax: a captured row with top_k 1 must be drawn from the law it records.
        info.is_all_greedy = False


def after_filter_batch(_result: Any, info: Any, keep_indices: Sequence[int], _keep_device: Any) -> None:
    info.sc_plan = plan_for(info).take(keep_indices)


def after_merge_batch(_result: Any, info: Any, other: Any) -> None:
    info.sc_plan = plan_for(info) + plan_for(other)


def after_copy_for_forward(result: Any, info: Any) -> None:
    result.sc_plan = plan_for(info)
