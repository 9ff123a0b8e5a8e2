"""Speculative verification: which drafted tokens are committed, and the one token that follows them.

Both schemes commit a token with exactly the target's law at its slot, whatever the draft proposed. A block of n slots
has n - 1 drafted tokens; slot j is the target's law of the token that follows the anchor and j drafted tokens.
A slot without a law (non-finite logits) commits the token -1: the caller ends that response.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from miles_ext.law import residual, sample


class Verdict(NamedTuple):
    """tokens: int64 [B, n], of which the first `counts` (int64 [B], 1..n) are committed: drafts, then one bonus."""

    tokens: Tensor
    counts: Tensor


def verify_target_only(probs: Tensor, drafted: Tensor, token_uniforms: Tensor) -> Verdict:
    """Draw from the target at every slot and accept while the draw is the drafted token.

    probs: [B, n, V]. drafted: int64 [B, n - 1]. token_uniforms: float64 [B, n]. A slot's draw uses the uniform that
    regular decoding would use at that position, so both decode the same response.
    """
    batch, slots, vocab = probs.shape
    drawn = sample(probs.view(-1, vocab), token_uniforms.reshape(-1)).view(batch, slots)
    return Verdict(drawn, _leading(drawn[:, :-1] == drafted) + 1)


def verify_chain(
    probs: Tensor,
    drafted: Tensor,
    candidates: Tensor,
    proposal: Tensor,
    accept_uniforms: Tensor,
    residual_uniforms: Tensor,
    token_uniforms: Tensor,
) -> Verdict:
    """Chain rejection (Leviathan, Kalman and Matias 2023): accept while u * q < p, then draw from (p - q)+.

    probs: [B, n, V]. drafted: int64 [B, n - 1], drawn from `proposal` [B, n - 1, C], the probabilities of
    `candidates` int64 [B, n - 1, C]. Uniforms: float64 [B, n]. Where every draft is accepted, the bonus is drawn from
    the target's law of the last slot with its token uniform.
    """
    batch, slots, _ = probs.shape
    rows = torch.arange(batch, device=probs.device)
    p = probs[:, :-1].gather(-1, drafted[..., None])[..., 0]
    q = torch.where(candidates == drafted[..., None], proposal, 0.0).sum(-1)
    # Strict, so that a token of zero target mass is never accepted; false where p is NaN.
    accepted = _leading(accept_uniforms[:, :-1] * q < p)
    rejected = accepted < slots - 1
    final = probs[rows, accepted]
    slot = accepted.clamp_max(slots - 2)
    law_of_draft = torch.zeros_like(final, dtype=torch.float64)
    law_of_draft.scatter_(-1, candidates[rows, slot], proposal[rows, slot].double() * rejected[:, None])
    uniforms = torch.where(rejected, residual_uniforms[rows, accepted], token_uniforms[:, -1])
    bonus = sample(residual(final, law_of_draft), uniforms)
    tokens = torch.cat((drafted, bonus[:, None]), 1).scatter(1, accepted[:, None], bonus[:, None])
    return Verdict(tokens, accepted + 1)


def _leading(agrees: Tensor) -> Tensor:
    """How many leading columns of bool [B, m] hold, int64 [B]."""
    return agrees.to(torch.int64).cumprod(-1).sum(-1)
