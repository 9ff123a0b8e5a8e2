"""The score-centered loss as Miles' custom loss: its rows of the logits, its temperature, its reducers."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from miles.backends.training_utils.cp_utils import get_local_response_loss_masks, slice_log_prob_with_cp
from miles.backends.training_utils.parallel import get_parallel_state
from miles.utils.misc import load_function
from torch import Tensor

from miles_ext.errors import SupportError
from miles_ext.logprobs import VocabShard
from miles_ext.miles_adapter.arguments import settings_of, spec_of
from miles_ext.miles_adapter.samples import ATTRIBUTE, SampleRows
from miles_ext.miles_adapter.versions import resolve, version
from miles_ext.records import SupportRows
from miles_ext.score_centering import SupportTensors
from miles_ext.score_centering import score_centered_loss as centered

# Miles logs these as train/NAME. Every micro-batch gives all of them in this order, as its aggregation requires.
METRICS = {
    "train_rollout_logprob_abs_diff": "logprob_gap",
    "tis": "weight",
    "tis_clipfrac": "weight_clipped",
    "sc_correction_loss": "correction_loss",
    "sc_correction_norm": "correction_norm",
    "sc_correction_tail": "correction_tail",
    "sc_support_mass_q": "support_mass_q",
    "sc_support_mass_p": "support_mass_p",
    "sc_tail_ratio": "tail_ratio",
    "sc_tail_ratio_bounded": "tail_ratio_bounded",
    "sc_support_size": "support_size",
    "sc_sampled_in_support": "sampled_in_support",
}
Reducer = Callable[[Tensor], Tensor]


def score_centered_loss(
    args: Namespace, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Reducer
) -> tuple[Tensor, dict[str, Tensor]]:
    """--custom-loss-function-path, with --loss-type custom_loss.

    logits: [1, T, V / TP] packed (thd) or [B, longest, V / TP] (bshd): this rank's share of sequence and vocabulary,
    not divided by the temperature. Ratios are those of the current model to the sampler. Raises SupportError for rows
    that are missing or not of these tokens.
    """
    settings, spec = settings_of(args), spec_of(args)
    records = require_records(batch, spec)
    positions, tokens, rows = local(args, batch, records, logits)
    shard = vocabulary(logits, records[0].vocab_size)
    support = SupportTensors.from_arrays(
        rows.token_ids, rows.logprobs, rows.offsets, tokens, rows.sampled_logprobs, rows.kind, logits.device
    )
    advantages = torch.where(active(args, batch), torch.cat(batch["advantages"]), 0.0)
    scored = logits.reshape(-1, logits.shape[-1])[positions]
    losses, metrics = centered(scored, support, advantages, settings.estimator, spec.temperature, shard)
    loss = objective_reducer(args, batch, sum_of_sample_mean)(losses)
    if len(tokens) == 0:
        loss = loss + 0 * logits.sum()  # every rank must take part in the backward pass
    reported = {"loss": loss, "pg_loss": sum_of_sample_mean(metrics["pg_loss"])}
    reported |= {name: sum_of_sample_mean(metrics[ours]) for name, ours in METRICS.items()}
    return loss, {name: value.detach().clone() for name, value in reported.items()}


def require_records(batch: dict[str, Any], spec: Any) -> list[SampleRows]:
    records = batch.get(ATTRIBUTE)
    if not records:
        raise SupportError(
            "a micro-batch has no support rows; set --custom-megatron-init-path to "
            "miles_ext.miles_adapter.trainer.init"
        )
    for index, (one, length) in enumerate(zip(records, batch["response_lengths"], strict=True)):
        if len(one) != length or one.spec != spec:
            raise SupportError(
                f"sample {index} of a micro-batch: {len(one)} rows sampled with {one.spec}; accepted: {length}, "
                f"with {spec}"
            )
    return records


def local(
    args: Namespace, batch: dict[str, Any], records: list[SampleRows], logits: Tensor
) -> tuple[Tensor, np.ndarray, SupportRows]:
    """(rows of the flattened logits, sampled ids, support rows) of the response tokens that this rank scores."""
    lengths = batch["total_lengths"], batch["response_lengths"]
    longest = batch.get("max_seq_lens")
    # Miles cuts the logits itself: it is given their row numbers in their place.
    numbers = torch.arange(logits.shape[0] * logits.shape[1], dtype=torch.float32, device=logits.device)
    plain = Namespace(**{**vars(args), "rollout_temperature": 1.0, "true_on_policy_mode": False})
    cut = list(
        resolve(f"{version('trainer').responses}:get_responses")(
            numbers.view(*logits.shape[:2], 1), args=plain, unconcat_tokens=batch["unconcat_tokens"],
            total_lengths=lengths[0], response_lengths=lengths[1], max_seq_lens=longest,
        )
    )  # fmt: skip
    parts = []
    for index, (record, total, length) in enumerate(zip(records, *lengths, strict=True)):
        room = longest[index] if longest is not None else None
        mine = slice_log_prob_with_cp(list(range(length)), total, length, args.qkv_format, room)
        parts.append(take(record.rows, mine))
    rows = SupportRows.concatenate(parts)
    positions = torch.cat([position.view(-1) for position, _ in cut]).long()
    tokens = torch.cat([token for _, token in cut])
    if len(rows) != len(tokens):
        raise SupportError(f"{len(rows)} support rows for {len(tokens)} response tokens of this rank")
    require_sampled(batch, rows)
    return positions, tokens.cpu().numpy(), rows


def take(rows: SupportRows, numbers: list[int]) -> SupportRows:
    """Rows by number: a context-parallel rank has two runs of them at most."""
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1 if numbers else []
    runs = np.split(np.asarray(numbers, int), cuts)
    return SupportRows.concatenate([rows[run[0] : run[-1] + 1] if len(run) else rows[0:0] for run in runs])


def require_sampled(batch: dict[str, Any], rows: SupportRows) -> None:
    """Rollout logprobs were taken from the rows: where they differ, rows and samples were shuffled apart."""
    if not batch.get("rollout_log_probs"):
        raise SupportError("a micro-batch has no rollout_log_probs beside its rows; do not drop them from the samples")
    recorded = torch.cat(batch["rollout_log_probs"]).float().cpu().numpy()
    if not np.array_equal(recorded, rows.sampled_logprobs):
        raise SupportError("the rows of a micro-batch are of other tokens than its rollout_log_probs")


def active(args: Namespace, batch: dict[str, Any]) -> Tensor:
    """Which of this rank's response tokens are trained: what stands in for an advantage elsewhere is never read."""
    masks = get_local_response_loss_masks(
        batch["total_lengths"], batch["response_lengths"], batch["loss_masks"], args.qkv_format,
        batch.get("max_seq_lens"),
    )  # fmt: skip
    return torch.cat(masks).to(batch["advantages"][0].device).bool()


def vocabulary(logits: Tensor, real: int) -> VocabShard:
    """This rank's columns. What Megatron pads beyond the engine's vocabulary has no mass."""
    group, width = get_parallel_state().tp, logits.shape[-1]
    if width * group.size < real:
        raise SupportError(f"rows over a vocabulary of {real}, and a model with {width * group.size} columns of logits")
    return VocabShard(group.group if group.size > 1 else None, group.rank * width, real)


def objective_reducer(args: Namespace, batch: dict[str, Any], default: Reducer) -> Reducer:
    """--custom-pg-loss-reducer-function-path, where it is set."""
    path = getattr(args, "custom_pg_loss_reducer_function_path", None)
    if path is None:
        return default
    return load_function(path)(
        batch["total_lengths"], batch["response_lengths"], batch["loss_masks"], args.calculate_per_token_loss
    )
