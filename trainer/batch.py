"""Trajectories to micro-batches: who trains on what, which logits rows are scored, and what each token weighs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from miles_ext.errors import SupportError
from miles_ext.records import Status, SupportRows, Trajectory

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
PAD = 0  # any id of the vocabulary: padding is on the right, and causal attention never looks there


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro-batch of one rank: B sequences padded on the right to L, n loss tokens. Host arrays.

    input_ids: int64 [B, L]; lengths: int64 [B], what of each line is no padding, at least 1.
    rows: int64 [n], index into the flattened [B * L] hidden states: response token t is scored from P + t - 1.
    support: n rows, all OK. sampled_ids: int64 [n].
    advantages, scale: float64 [n]; scale is what multiplies the token's loss, 1 over a global denominator.
    trajectory, token: int64 [n], where a loss token came from: index of its trajectory, and t.
    """

    input_ids: Ints
    lengths: Ints
    rows: Ints
    support: SupportRows
    sampled_ids: Ints
    advantages: Floats
    scale: Floats
    trajectory: Ints
    token: Ints

    def __len__(self) -> int:
        return len(self.rows)


def usable(
    trajectories: Sequence[Trajectory], content_failure: Literal["stop", "drop_group"]
) -> tuple[Ints, set[int]]:
    """Indices of the trajectories to train on, and the groups that a row whose status is not OK made untrainable.

    Raises SupportError naming prompt, row and status where the rule is `stop`, where a trajectory has no support or an
    empty prompt, and where nothing is left.
    """
    dropped: set[int] = set()
    for index, trajectory in enumerate(trajectories):
        completion, where = trajectory.completion, f"trajectory {index} of prompt {trajectory.prompt_id}"
        if completion.support is None:
            raise SupportError(f"{where} has no support rows; sample with capture 'complete' or 'head' to train on it")
        if not len(completion.prompt_ids):
            raise SupportError(f"{where} has an empty prompt; accepted: at least one token")
        if len(trajectory.loss_mask) != len(completion) or len(completion.support) != len(completion):
            raise SupportError(
                f"{where} has {len(completion)} tokens, {len(completion.support)} support rows and a loss mask of "
                f"{len(trajectory.loss_mask)}; accepted: one of each a token"
            )
        if completion.worst_status is Status.OK:
            continue
        if content_failure == "stop":
            row = int(np.argmax(completion.support.status != Status.OK))
            status = Status(int(completion.support.status[row]))
            raise SupportError(
                f"{where}: support row {row} is {status.name}; raise max_support or filter the sampling, "
                "or set trainer.content_failure to 'drop_group'"
            )
        dropped.add(trajectory.group)
    kept = np.flatnonzero([trajectory.group not in dropped for trajectory in trajectories])
    if not len(kept):
        raise SupportError(f"none of {len(trajectories)} trajectories is trainable ({len(dropped)} groups dropped)")
    return kept, dropped


def mini_batches(groups: Sequence[int], count: int) -> list[Ints]:
    """Contiguous splits of the groups, in order of first appearance, as positions in `groups`; no group is split.

    Fewer than `count` where there are fewer groups.
    """
    first_seen = {group: order for order, group in enumerate(dict.fromkeys(groups))}
    order = np.array([first_seen[group] for group in groups])
    parts = np.array_split(np.arange(len(first_seen)), min(count, len(first_seen)))
    return [np.flatnonzero(np.isin(order, part)) for part in parts]


def token_scale(masks: Sequence[NDArray[np.bool_]], reduction: Literal["token_mean", "sequence_mean"]) -> Floats:
    """What each loss token of a sequence weighs, float64 [sequences], over a whole mini-batch of all ranks.

    token_mean: 1 / loss tokens. sequence_mean: 1 / (its own loss tokens x sequences that have any).
    """
    lengths = np.array([np.count_nonzero(mask) for mask in masks], np.float64)
    if not lengths.any():
        raise ValueError(f"no loss token in a mini-batch of {len(masks)} trajectories; check the loss masks")
    if reduction == "token_mean":
        return np.full(len(lengths), 1 / lengths.sum())
    return 1 / np.maximum(lengths, 1) / np.count_nonzero(lengths)


def plan(lengths: Ints, world_size: int, micro_tokens: int) -> list[list[Ints]]:
    """Micro-batches of every rank as positions in `lengths` (tokens a sequence); the same number for each rank.

    Sequences are dealt by falling length, so that ranks carry alike and padding is small; a micro-batch holds
    `micro_tokens` padded tokens at most, or one sequence. Ranks with less data get empty micro-batches: they still
    take part in collectives.
    """
    order = np.argsort(-lengths, kind="stable")
    ranks: list[list[Ints]] = []
    for rank in range(world_size):
        mine, micro = order[rank::world_size], []
        while len(mine):
            fits = max(1, micro_tokens // int(lengths[mine[0]]))
            micro.append(mine[:fits])
            mine = mine[fits:]
        ranks.append(micro)
    most = max(len(micro) for micro in ranks)
    return [micro + [np.zeros(0, np.int64)] * (most - len(micro)) for micro in ranks]


def make_batch(trajectories: Sequence[Trajectory], indices: Ints, advantages: Floats, scale: Floats) -> Batch:
    """The micro-batch of `trajectories[i] for i in indices`; advantages and scale are aligned with `indices`."""
    chosen = [trajectories[index] for index in indices]
    # The last response token predicts nothing that was sampled: it is no input.
    sequences = [np.concatenate([t.completion.prompt_ids, t.completion.response_ids[:-1]]) for t in chosen]
    width = max((len(sequence) for sequence in sequences), default=1)
    input_ids = np.full((max(len(chosen), 1), width), PAD, np.int64)
    for line, sequence in zip(input_ids, sequences, strict=False):  # an empty batch still has one line of padding
        line[: len(sequence)] = sequence

    tokens = [np.flatnonzero(t.loss_mask) for t in chosen]
    counts = [len(found) for found in tokens]
    token = np.concatenate([np.zeros(0, np.int64), *tokens])
    prompts = np.array([len(t.completion.prompt_ids) for t in chosen], np.int64)
    line_start = np.arange(len(chosen), dtype=np.int64) * width
    supports = [_select(t.completion.support, t.loss_mask) for t in chosen if t.completion.support is not None]
    return Batch(
        input_ids=input_ids,
        lengths=np.array([len(sequence) for sequence in sequences] or [1], np.int64),
        rows=np.repeat(line_start + prompts - 1, counts) + token,
        support=SupportRows.concatenate(supports) if supports else SupportRows.empty("complete"),
        sampled_ids=np.concatenate([np.zeros(0, np.int64), *(t.completion.response_ids[t.loss_mask] for t in chosen)]),
        advantages=np.repeat(advantages, counts),
        scale=np.repeat(scale, counts),
        trajectory=np.repeat(indices, counts),
        token=token,
    )


def _select(support: SupportRows, mask: NDArray[np.bool_]) -> SupportRows:
    if mask.all():
        return support
    entries = np.repeat(mask, support.lengths)
    return replace(
        support,
        token_ids=support.token_ids[entries],
        logprobs=support.logprobs[entries],
        offsets=np.concatenate([[0], np.cumsum(support.lengths[mask])]).astype(np.int64),
        sampled_logprobs=support.sampled_logprobs[mask],
        status=support.status[mask],
    )
