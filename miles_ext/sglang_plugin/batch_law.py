"""The law of a batch's rows under this server's filter order: what the sampler and both verifiers call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from miles_ext.law import Filters, filtered_law
from miles_ext.sglang_plugin.plan import BatchPlan
from miles_ext.sglang_plugin.settings import read_settings

if TYPE_CHECKING:
    from jaxtyping import Float


def batch_law(logits: Float[Tensor, "n v"], plan: BatchPlan, *, keep: bool = True) -> Float[Tensor, "n v"]:
    """The law of every row, n = len(plan) * positions. keep: whether device copies made here may outlive the call."""
    return filtered_law(logits, _filters(logits, plan, keep))


def prepare(logits: Float[Tensor, "n v"], plan: BatchPlan) -> None:
    """Copy the plan's filters to the device now: in an accept step memory is borrowed and does not outlive it."""
    _filters(logits, plan, keep=True).on(logits.device)


def _filters(logits: Tensor, plan: BatchPlan, keep: bool) -> Filters:
    """Checked once a composition of the batch."""
    n, v = logits.shape
    order = read_settings().filter_order
    key = ("filters", n, v, order)
    filters = plan.device_cache.get(key) or Filters.of(logits, *plan.repeat(n // len(plan)), order)
    if keep:
        plan.device_cache[key] = filters
    return filters
