"""What a draft learns from: its blocks in one differentiable pass, and their distance from the target's own law."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from experiments.models.sample import Texts
from rollout.embedded.draft import Draft
from rollout.embedded.transformer import additive_mask, attend


class Lesson(NamedTuple):
    """Blocks at random anchors of B texts, and what the target says of their slots; S = block size - 1."""

    tokens: torch.Tensor  # int64 [B, T], the texts
    taps: torch.Tensor  # [B, T', K * H], the target's tapped hidden states by position
    anchors: torch.Tensor  # int64 [B, A], positions of the anchors
    law: torch.Tensor  # float32 [B, A, S, V], the target's law of each slot's token
    valid: torch.Tensor  # bool [B, A, S], slots inside the response


def lesson(draft: Draft, texts: Texts, ends: torch.Tensor, rows: torch.Tensor, where: torch.Tensor) -> Lesson:
    """Blocks of texts `rows` int64 [B]; `where` [B, A] in [0, 1) places the anchors between the first response token
    and the last but one. `ends` int64 [all texts]: the position after the last token that counts."""
    low, high = texts.prompt_lengths[rows, None], ends[rows, None] - 1
    anchors = (low + (where * (high - low)).long()).minimum(high - 1).maximum(low)
    slots = anchors[:, :, None] + torch.arange(draft.config.block_size - 1, device=anchors.device)
    valid = slots < high[:, :, None]
    hidden = texts.hidden[rows]
    index = slots.clamp_max(hidden.shape[1] - 1).flatten(1)[..., None].expand(-1, -1, hidden.shape[-1])
    logits = draft.target.logits(hidden.gather(1, index))
    law = torch.softmax(logits.float(), -1).unflatten(1, slots.shape[1:])
    return Lesson(texts.tokens[rows], texts.taps[rows], anchors, law, valid)


def blocks_hidden(draft: Draft, tokens: torch.Tensor, taps: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """Differentiable hidden states [B, A, block - 1, H] of the blocks at anchor positions int64 [B, A].

    tokens int64 [B, T]; taps [B, T', K * H] of positions 0 .. T' - 1. The same arithmetic as the engine's cached pass.
    """
    rows, count = anchors.shape
    size = draft.config.block_size
    seen = torch.arange(taps.shape[1], device=taps.device)
    own = torch.arange(count * size, device=taps.device) // size
    positions = (anchors[:, :, None] + torch.arange(size, device=taps.device)).flatten(1)
    before = seen < anchors.repeat_interleave(size, 1)[:, :, None]
    within = (own[:, None] == own).expand(rows, -1, -1)
    block = draft.config.block
    mask = additive_mask(torch.cat((before, within), -1), block.group, taps.dtype)
    features = draft.context(taps)
    context_angles, angles = draft.rope.at(seen.expand(rows, -1)), draft.rope.at(positions)
    x = draft.embed_block(tokens.gather(1, anchors)).flatten(1, 2)
    for layer in draft.layers:
        context_keys, context_values = layer.project_context(features, draft.rope, context_angles)
        queries, keys, values = layer.project(x, draft.rope, angles)
        keys = torch.cat((context_keys, keys), 1).transpose(1, 2)
        values = torch.cat((context_values, values), 1).transpose(1, 2)
        x = layer.finish(x, attend(queries, keys, values, mask))
    x = F.rms_norm(x, draft.norm.shape, draft.norm, block.rms_eps)
    return x.unflatten(1, (count, size))[:, :, 1:]


def block_loss(draft: Draft, given: Lesson, decay: float, acceptance: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, nats a slot, and the expected accept length of these blocks, both scalars.

    The loss is the cross entropy of the unary logits and of the selector to the target's law, slot j weighing
    exp(-j / decay), less `acceptance` times the expected share of a block's slots that chain rejection accepts. Along
    texts that the target sampled that expectation is exact for a selector over the whole vocabulary: a slot is
    accepted with sum_v min(p, q), and a prefix of the text stands for accepted paths in the ratio min(1, q / p).
    """
    tokens, _, anchors, law, valid = given
    hidden = blocks_hidden(draft, tokens, given.taps, anchors)
    slots = torch.arange(draft.config.block_size - 1, device=hidden.device)
    at = (anchors[:, :, None] + slots).clamp_max(tokens.shape[1] - 2).flatten(1)
    previous, drawn = (tokens.gather(1, index).view(valid.shape) for index in (at, at + 1))
    unary = draft.target.logits(hidden).float()
    keyed = F.embedding(previous, draft.predecessor) * F.linear(hidden, draft.projection)
    selected = torch.log_softmax(unary + (keyed @ draft.successor.T).float(), -1)
    weights = torch.exp(-slots / decay) * valid
    cross = -(law * selected).sum(-1) - (law * torch.log_softmax(unary, -1)).sum(-1)
    loss = (cross * weights).sum() / weights.sum()

    overlap = torch.minimum(law, selected.exp()).sum(-1) * valid
    gap = selected.gather(-1, drawn[..., None]) - law.gather(-1, drawn[..., None]).clamp_min(1e-30).log()
    stays = gap.squeeze(-1).clamp_max(0.0).cumsum(-1)
    reached = torch.cat((torch.zeros_like(stays[..., :1]), stays[..., :-1]), -1).exp()
    accepted = (overlap * reached).sum(-1).mean()
    if acceptance:
        loss = loss - acceptance * accepted / len(slots)
    return loss, 1.0 + accepted.detach()
