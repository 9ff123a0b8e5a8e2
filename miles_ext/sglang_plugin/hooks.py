"""Everything the plugin touches in sglang, at a glance.

One line a hook, under the feature that it serves: the function, how it is hooked, by what, and the digest of the source
that the hook was written for. `python -m miles_ext.sglang_plugin.hooks` prints those of the installed sglang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from miles_ext.sglang_plugin import (
    admission,
    carrier,
    guard,
    mask_embedding,
    plan,
    report,
    sampler,
    stock_mask,
    stream,
    thresholds,
    verifier,
    weights,
)


class Hook(NamedTuple):
    target: str
    how: Literal["AFTER", "AROUND", "REPLACE"]
    function: Callable[..., Any]
    digest: str


INFO = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
ACCEPT = "sglang.kernels.ops.speculative.dspark.dspark_accept"
UTILS = "sglang.srt.speculative.dflash_utils"
WORKER = "sglang.srt.speculative.dflash_worker_v2"
V2 = f"{WORKER}.DFlashWorkerV2"
MASK = "sglang.srt.speculative.spec_sampling_mask.SpeculativeSamplingMaskCapture"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
PARTS = "sglang.srt.managers.scheduler_components"
STATE = f"{PARTS}.internal_state.SchedulerInternalStateController"
UPDATE = f"{PARTS}.weight_updater.SchedulerWeightUpdaterManager"
RESULTS = f"{PARTS}.batch_result_processor.SchedulerBatchResultProcessor"
SAMPLER = "sglang.srt.layers.sampler.Sampler"
MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
SERVING = "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase"
GENERATE = "sglang.srt.managers.io_struct.GenerateReqInput"

# fmt: off
HOOKS: dict[str, tuple[Hook, ...]] = {
    # Regular sampler, prefill token, target-only verifier and chain verifier draw from the law
    "one_law": (
        Hook(f"{INFO}.adjusted_from_schedule_batch", "AFTER", plan.after_from_schedule_batch, "bb83cfb38e936c58"),
        Hook(f"{INFO}.adjusted_filter_batch", "AFTER", plan.after_filter_batch, "58e166ac9a4ddb8d"),
        Hook(f"{INFO}.adjusted_merge_batch", "AFTER", plan.after_merge_batch, "4c2582c2f37e5fd5"),
        Hook(f"{INFO}.copy_for_forward", "AFTER", plan.after_copy_for_forward, "a009750025c965f2"),
        Hook(f"{SAMPLER}.forward", "AROUND", sampler.around_forward, "f8d795ab811a6961"),
        Hook(f"{UTILS}.build_speculative_verify_target_probs", "REPLACE", verifier.target_probs, "6c883dbf014837b5"),
        Hook(f"{ACCEPT}._accept_sampling_core", "AROUND", verifier.around_accept_sampling_core, "4da858f5cbf7d57b"),
        Hook(f"{ACCEPT}.accept_sampling", "AROUND", verifier.around_accept_sampling, "0bd46c579ec67479"),
    ),
    # A support is never cut short
    "overflow": (
        Hook(f"{MASK}.build_output", "AROUND", stock_mask.around_build_output, "c663b56c16946830"),
    ),
    # What would not be drawn from the law is refused
    "strict_refusal": (
        Hook(f"{SCHEDULER}._create_generation_req", "AFTER", admission.after_create_request, "9f867d91dee9725a"),
        Hook(f"{V2}._accept_block", "AROUND", verifier.around_accept_block, "d06ac1b8f8de12b1"),
        Hook(f"{V2}.forward_batch_generation", "AROUND", verifier.around_forward, "f42a3bb18adba2a5"),
        Hook(f"{STATE}._validate_accept_threshold", "AROUND", thresholds.around_validate, "36c69c5eabb2af87"),
    ),
    # Rows leave with the response
    "flat_capture": (
        Hook(f"{SCHEDULER}.get_output_streamer_class", "AROUND", stream.around_streamer_class, "ec7f2f93f3a97f1c"),
        Hook(f"{MANAGER}.update_request_meta_info", "AROUND", stream.around_update_meta_info, "acccc58e0ca8eb2f"),
    ),
    # Requests survive a gateway that knows no sampling rows
    "carried_fields": (
        Hook(f"{GENERATE}.normalize_batch_and_arguments", "AROUND", carrier.around_normalize, "bc4f3dad4d13fed7"),
        Hook(f"{SERVING}.handle_request", "AROUND", carrier.around_handle_request, "f47d3e8fad409f77"),
    ),
    # Weight updates reach the target only
    "target_only_weights": (
        Hook(f"{SCHEDULER}.__init__", "AFTER", weights.after_scheduler_init, "a4a5297acc175a1e"),
        Hook(f"{UPDATE}._select_runners", "AROUND", weights.around_select_runners, "778803c5ed26e88f"),
        Hook(f"{UPDATE}.check_weights", "AROUND", weights.around_check_weights, "f7c2707ec767b739"),
        Hook(f"{UPDATE}.begin_weight_update", "AROUND", weights.around_begin, "fd496cbc2ddb0f75"),
        Hook(f"{UPDATE}.end_weight_update", "AROUND", weights.around_end, "c977f83bb34484a2"),
        Hook(f"{UPDATE}.update_weights_from_tensor", "AROUND", weights.around_piece, "7ffddf6f5fef887d"),
        Hook(f"{UPDATE}.update_weights_from_distributed", "AROUND", weights.around_piece, "aea7a898d7666ec9"),
        Hook(f"{UPDATE}.update_weights_from_disk", "AROUND", weights.around_whole, "7dea681e1eed3a25"),
        Hook(f"{UPDATE}.update_weights_from_ipc", "AROUND", weights.around_whole, "16d1756a77e45afb"),
        Hook(f"{UPDATE}.resume_memory_occupation", "AFTER", weights.after_resume_memory, "a07abb1165a5e287"),
    ),
    # The draft's mask embedding stays out of the target
    "private_mask_embedding": (
        Hook(f"{V2}._maybe_merge_trained_mask_embedding", "AROUND", mask_embedding.around_merge, "d8f785a327d7acab"),
        Hook(f"{WORKER}._resolve_dflash_embedding_module", "AFTER", mask_embedding.after_resolve, "d3413dc05317a60d"),
    ),
    # The proof
    "report": (
        Hook(f"{STATE}._add_speculative", "AFTER", report.after_add_speculative, "4e3ebbce3bfaecf0"),
    ),
}

# Not hooked, but the hooks above hold only while these stay as they are.
RELIED: dict[str, tuple[tuple[str, str], ...]] = {
    "one_law": (
        (f"{UTILS}.compute_dflash_sampling_correct_drafts_and_bonus", "91c0eb0372089e6c"),
        ("sglang.kernels.ops.speculative.reject_sampling.chain_speculative_sampling_triton", "405e6a077e7f13b4"),
        (f"{V2}._selector_sampling_accept", "4516e33c143cb528"),
        (f"{WORKER}._commit_accept", "3b031492940eab58"),
        (f"{SAMPLER}._preprocess_logits", "510aab35bf494675"),
        (f"{SAMPLER}._build_sampling_mask_output", "bd7b35e3fc70c1d5"),
    ),
    "flat_capture": (
        (f"{RESULTS}._build_auxiliary_commits", "65761aebfc186f66"),
        (f"{RESULTS}.process_batch_result_decode", "c4c08ab3f8690085"),
        (f"{RESULTS}.process_batch_result_prefill", "a43539bf03ee4abf"),
        (f"{PARTS}.output_streamer.SchedulerOutputStreamer._stream_output_generation", "830e84a497de644a"),
        ("sglang.srt.managers.utils.GenerationBatchResult.copy_auxiliary_output_to_cpu", "6db70e284df78349"),
    ),
    "strict_refusal": (
        ("sglang.srt.managers.schedule_batch.Req.set_finish_with_abort", "d89976ccff9e4e25"),
    ),
}
# fmt: on


def main() -> None:
    hooked = [hook.target for hooks in HOOKS.values() for hook in hooks]
    relied = [target for targets in RELIED.values() for target, _ in targets]
    for target in hooked + relied:
        print(guard.source_digest(target), target)


if __name__ == "__main__":
    main()
