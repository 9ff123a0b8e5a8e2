"""What the loaded worker is, read from its objects and not from what it was asked to be."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from miles_ext.capability import ArmKind, Verifier
from miles_ext.sampling import FilterOrder
from miles_ext.sglang_plugin.settings import read_settings

PRODUCTION_VERIFIERS = {
    "target_only": "sglang/kernels/ops/speculative/sampling.py",
    "chain": "sglang/kernels/ops/speculative/reject_sampling.py",
}


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """blockers: switches in force under which committed tokens are not samples of the law."""

    arm: ArmKind
    verifier: Verifier
    verifier_impl: str
    sampling_verify_available: bool
    accept_threshold_single: float
    accept_threshold_acc: float
    filter_order: FilterOrder
    max_support: int
    vocab_size: int
    blockers: tuple[str, ...]


def inspect_worker(scheduler: Any) -> WorkerFacts:
    """Facts of one rank. Raises nothing: an unknown speculative algorithm is a blocker."""
    from sglang.srt.runtime_context import get_spec

    spec = get_spec()
    single, acc = spec.speculative_accept_threshold_single, spec.speculative_accept_threshold_acc
    verifier = verifier_of(scheduler)
    return WorkerFacts(
        arm=ARM_OF[verifier],
        verifier=verifier,
        verifier_impl=verifier_implementation(verifier),
        sampling_verify_available=sampling_verify_available(scheduler, verifier),
        accept_threshold_single=float(single),
        accept_threshold_acc=float(acc),
        filter_order=read_settings().filter_order,
        max_support=int(scheduler.server_args.sampling_mask_max_tokens),
        vocab_size=int(scheduler.model_config.vocab_size),
        blockers=tuple(_blockers(scheduler, verifier, float(single), float(acc))),
    )


ARM_OF: dict[Verifier, ArmKind] = {"none": "regular", "target_only": "dflash", "chain": "dflash2"}


def verifier_of(scheduler: Any) -> Verifier:
    worker = scheduler.draft_worker
    if scheduler.spec_algorithm.is_none() or worker is None:
        return "none"
    has_proposals = getattr(worker, "selector", None) is not None or getattr(worker, "lilicorr", None) is not None
    return "chain" if has_proposals else "target_only"


def sampling_verify_available(scheduler: Any, verifier: Verifier) -> bool:
    """Whether a sampled request is verified by rejection, and not by comparing with the argmax."""
    from sglang.srt.speculative.dflash_utils import is_dflash_sampling_verify_available

    if verifier == "none":
        return True
    if verifier == "target_only":
        return is_dflash_sampling_verify_available()
    worker = scheduler.draft_worker
    if worker.selector is not None:
        return bool(worker._selector_sampling_enabled)
    return bool(worker._lilicorr_sampling_enabled)


def verifier_implementation(verifier: Verifier) -> str:
    """`production` where the kernel in use is the file that sglang ships, else `test`."""
    if verifier == "none":
        return "production"
    from sglang.kernels.ops.speculative.dspark import dspark_accept
    from sglang.srt.speculative import dflash_utils

    kernel: Any = (
        dspark_accept.chain_speculative_sampling_triton
        if verifier == "chain"
        else dflash_utils.tree_speculative_sampling_target_only
    )
    if kernel is None:
        return "production"  # none at all: the availability above says so
    source = inspect.getsourcefile(inspect.unwrap(kernel)) or ""
    return "production" if source.endswith(PRODUCTION_VERIFIERS[verifier]) else "test"


def _blockers(scheduler: Any, verifier: Verifier, single: float, acc: float) -> list[str]:
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_exec, get_parallel

    found = []
    if envs.SGLANG_SIMULATE_ACC_LEN.get() > 0:
        found.append("SGLANG_SIMULATE_ACC_LEN")
    if verifier != "none" and not scheduler.spec_algorithm.is_dflash():
        found.append("--speculative-algorithm other than DFLASH")
    if verifier == "target_only" and (single != 1.0 or acc != 1.0):
        found.append("--speculative-accept-threshold-* other than 1.0")
    if get_parallel().pp_size > 1:
        found.append("--pp-size above 1")
    if get_exec().kernel.sampling_backend == "ascend":
        found.append("--sampling-backend ascend")
    if get_exec().deterministic.rl_on_policy_target is not None:
        found.append("--rl-on-policy-target")
    if get_exec().features.enable_watermark:
        found.append("--enable-watermark")
    return found
