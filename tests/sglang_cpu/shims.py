"""The seams at which sglang's CUDA code cannot run on a CPU, each with the least that stands in for it. Tests only."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from tests.sglang_cpu import verifiers

VERIFIER_VARIABLE = "SGLANG_CPU_TEST_VERIFIER"  # 0 leaves the target-only verifier out, as on a device without it
PROPOSAL_VARIABLE = "SGLANG_CPU_TEST_PROPOSALS"  # 0 loses the selector's proposal law, as a broken draft would


def register() -> None:
    """Entry point (`sglang.srt.plugins`)."""
    from sglang.kernels.ops.speculative.dspark import dspark_accept
    from sglang.srt.arg_groups.choices import add_draft_attention_backend_choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative import dflash_utils

    add_draft_attention_backend_choices(["torch_native"])
    torch.Tensor.record_stream = lambda self, s: None  # a CPU tensor has no stream to outlive
    dspark_accept.chain_speculative_sampling_triton = verifiers.chain
    if os.environ.get(VERIFIER_VARIABLE, "1") == "1":
        dflash_utils.tree_speculative_sampling_target_only = verifiers.target_only
        dflash_utils._DFLASH_SAMPLING_VERIFY_AVAILABLE = True

    root = "sglang.srt"
    for target, function, how in (
        (f"{root}.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup", _nothing, HookType.REPLACE),
        (f"{root}.mem_cache.allocation.assign_req_to_token_pool_func", assign_slots, HookType.REPLACE),
        (f"{root}.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend",
         around_forward_extend, HookType.AROUND),
        (f"{root}.models.dflash.DFlashAttention.__init__", after_draft_attention, HookType.AFTER),
    ):  # fmt: skip
        HookRegistry.register(target, function, how)
    if os.environ.get(PROPOSAL_VARIABLE, "1") == "0":
        target = f"{root}.speculative.dflash_worker_v2.DFlashWorkerV2._propose_selector_block"
        HookRegistry.register(target, after_proposal, HookType.AFTER)


def _nothing(_pool: Any) -> None:
    """Instead of the warm-up of a Triton copy."""


def assign_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Instead of a Triton kernel: the slots of each row go to its places start to end."""
    first = 0
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in list(spans)[:batch_size]:
        req_to_token[row, start:end] = out_cache_loc[first : first + end - start].to(req_to_token.dtype)
        first += end - start


def around_forward_extend(original: Callable[..., Any], backend: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any,
                          *args: Any, **rest: Any) -> Any:  # fmt: skip
    """torch_native knows no verify batch: it is an extension of every row by one block."""
    if not batch.forward_mode.is_target_verify():
        return original(backend, q, k, v, layer, batch, *args, **rest)
    names = ("extend_prefix_lens", "extend_seq_lens", "seq_lens")
    before = [getattr(batch, name) for name in names]
    block = q.shape[0] // batch.batch_size
    prefix = batch.seq_lens
    batch.extend_prefix_lens, batch.extend_seq_lens = prefix, torch.full_like(prefix, block)
    batch.seq_lens = prefix + block
    try:
        return original(backend, q, k, v, layer, batch, *args, **rest)
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(batch, name, value)


def after_proposal(_result: Any, worker: Any, **_: Any) -> None:
    worker._selector_sample = None


def after_draft_attention(_result: None, attention: Any, *_args: Any, **_rest: Any) -> None:
    attention.use_table_qk_norm_rope = False  # a Triton kernel
