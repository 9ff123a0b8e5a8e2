"""The score-centered policy gradient: A (w_y s_y - E_q[w s]), s the score, in closed form on recorded supports.

Per token, with everything but log p held fixed:

    L = -A [ w_y log p_y - sum_v c_v log p_v ],      dL/dz_j = -(A/T) [ w_y 1[j=y] - c_j - (w_y - sum c) p_j ]

complete support S: p renormalised over S, c_v = m_v = q_v f(p_v/q_v). head H: whole-vocabulary laws and a tail of
q modelled as proportional to p, which folds into c_v = m_v - alpha p_v. See docs/math.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles_ext.logprobs import SupportLogits, VocabShard, support_logits
from miles_ext.segments import Segments

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from numpy.typing import NDArray

Mode = Literal["none", "tis", "mis"]
Centering = Literal["on", "off", "diagnose"]


@dataclass(frozen=True)
class EstimatorConfig:
    """mode: importance weight f(r), r = p/q: `none` 1; `tis` min(r, tis_clip); `mis` r inside [mis_low, mis_high],
    else 0. centering: `on` subtracts the correction, `diagnose` computes it for the metrics and applies nothing,
    `off` leaves it out. rho_max: bound of the tail ratio. tail_floor: smallest tail mass that float32 can tell from
    rounding; float64 needs none. entropy: report the entropy of the trainer's law.
    """

    mode: Mode = "none"
    centering: Centering = "on"
    tis_clip: float = 2.0
    mis_low: float = 0.5
    mis_high: float = 5.0
    rho_max: float = 10.0
    tail_floor: float = 1e-6
    entropy: bool = False

    def __post_init__(self) -> None:
        if self.mode not in ("none", "tis", "mis"):
            raise ValueError(f"mode {self.mode!r}; accepted: 'none', 'tis', 'mis'")
        if self.centering not in ("on", "off", "diagnose"):
            raise ValueError(f"centering {self.centering!r}; accepted: 'on', 'off', 'diagnose'")
        for name in ("tis_clip", "rho_max"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} {getattr(self, name)}; accepted: a number > 0")
        if not 0 < self.mis_low < self.mis_high:
            raise ValueError(f"mis bounds [{self.mis_low}, {self.mis_high}]; accepted: 0 < mis_low < mis_high")
        if not 0 < self.tail_floor < 1:
            raise ValueError(f"tail_floor {self.tail_floor}; accepted: a number in (0, 1)")


@dataclass(frozen=True)
class SupportTensors:
    """Recorded laws of n sampled tokens on one device; the tensor form of `records.SupportRows`.

    token_ids: int64 [nnz]. logprobs: [nnz], log q. rows: layout of the entries. sampled: int64 [n].
    sampled_logprobs: [n], log q of the sampled token. kind: `complete` rows hold all of q's support, `head` rows its
    likeliest tokens.

    A token whose sampled logprob is not finite, or whose complete support is empty, has no recorded law (padding, a
    failed capture): its loss and gradient are 0. An empty head means plain policy gradient.
    """

    token_ids: Int[Tensor, " nnz"]
    logprobs: Float[Tensor, " nnz"]
    rows: Segments
    sampled: Int[Tensor, " n"]
    sampled_logprobs: Float[Tensor, " n"]
    kind: Literal["complete", "head"]

    @classmethod
    def from_arrays(
        cls,
        token_ids: NDArray[np.integer],
        logprobs: NDArray[np.floating],
        offsets: NDArray[np.integer],
        sampled: NDArray[np.integer],
        sampled_logprobs: NDArray[np.floating],
        kind: Literal["complete", "head"],
        device: torch.device | str = "cpu",
    ) -> SupportTensors:
        """From host arrays, flat rows as in `records.SupportRows`. Raises ValueError where lengths disagree."""
        if kind not in ("complete", "head"):
            raise ValueError(f"kind {kind!r}; accepted: 'complete', 'head'")
        if not (len(sampled) == len(sampled_logprobs) == len(offsets) - 1):
            raise ValueError(
                f"{len(sampled)} sampled ids, {len(sampled_logprobs)} sampled logprobs and {len(offsets) - 1} rows; "
                "accepted: one of each a token"
            )
        if not (len(token_ids) == len(logprobs) == offsets[-1]):
            raise ValueError(
                f"{len(token_ids)} ids and {len(logprobs)} logprobs for offsets that end at {offsets[-1]}; "
                "accepted: one of each an entry"
            )
        return cls(
            token_ids=torch.from_numpy(np.array(token_ids, np.int64)).to(device),
            logprobs=torch.from_numpy(np.array(logprobs)).to(device),
            rows=Segments.from_offsets(offsets, device),
            sampled=torch.from_numpy(np.array(sampled, np.int64)).to(device),
            sampled_logprobs=torch.from_numpy(np.array(sampled_logprobs)).to(device),
            kind=kind,
        )

    def __len__(self) -> int:
        return len(self.sampled)


def weights(log_ratio: Tensor, cfg: EstimatorConfig) -> Tensor:
    """f(r) of r = exp(log_ratio)."""
    if cfg.mode == "none":
        return torch.ones_like(log_ratio)
    if cfg.mode == "tis":
        return log_ratio.clamp_max(math.log(cfg.tis_clip)).exp()
    # Outside the band exp may be inf: select, never multiply by the mask.
    return torch.where(clipped(log_ratio, cfg), 0.0, log_ratio.exp())


def clipped(log_ratio: Tensor, cfg: EstimatorConfig) -> Tensor:
    """Where f(r) differs from r (never in mode none, which does not weigh)."""
    if cfg.mode == "none":
        return torch.zeros_like(log_ratio, dtype=torch.bool)
    if cfg.mode == "tis":
        return log_ratio > math.log(cfg.tis_clip)
    return (log_ratio < math.log(cfg.mis_low)) | (log_ratio > math.log(cfg.mis_high))


def masses(p: Tensor, q: Tensor, cfg: EstimatorConfig) -> Tensor:
    """q f(p/q) without forming the ratio."""
    if cfg.mode == "none":
        return q
    if cfg.mode == "tis":
        return torch.minimum(p, cfg.tis_clip * q)
    return torch.where((cfg.mis_low * q <= p) & (p <= cfg.mis_high * q), p, 0.0)


def tail_scale(rho: Tensor, cfg: EstimatorConfig) -> Tensor:
    """alpha = rho f(1/rho), rho the ratio of q's tail mass to p's."""
    if cfg.mode == "none":
        return rho
    if cfg.mode == "tis":
        return (cfg.tis_clip * rho).clamp_max(1.0)
    return ((cfg.mis_low * rho <= 1) & (1 <= cfg.mis_high * rho)).to(rho.dtype)


class Coefficients(NamedTuple):
    """What the gradient is made of. weight: [n], w_y. entries: c_v, folded. total: [n], sum of c over the row.

    mass_q, mass_p: [n], masses of the recorded entries. rho: [n], tail ratio in use (1 without a tail), and where it
    was bounded.
    """

    weight: Tensor
    entries: Tensor
    total: Tensor
    mass_q: Tensor
    mass_p: Tensor
    rho: Tensor
    rho_bounded: Tensor


def coefficients(
    log_ratio: Float[Tensor, " n"],
    p: Float[Tensor, "*entries"],
    q: Float[Tensor, "*entries"],
    rows: Segments,
    kind: Literal["complete", "head"],
    cfg: EstimatorConfig,
) -> Coefficients:
    """Weights and centering coefficients from log(p_y/q_y) of the sampled tokens and the folded laws of the entries.

    complete: p must be normalised over the support. head: p and q are normalised over the whole vocabulary.
    """
    weight = weights(log_ratio, cfg)
    mass = masses(p, q, cfg)
    mass_p, mass_q = rows.sum(p), rows.sum(q)
    if kind == "complete":
        return Coefficients(
            weight, mass, rows.sum(mass), mass_q, mass_p, torch.ones_like(weight), torch.zeros_like(weight)
        )
    # A tail is a difference from one: float32 rounding says nothing below the floor, and may even be negative.
    floor = cfg.tail_floor if p.dtype == torch.float32 else torch.finfo(p.dtype).tiny
    unbounded = (1 - mass_q).clamp_min(floor) / (1 - mass_p).clamp_min(floor)
    rho = unbounded.clamp_max(cfg.rho_max)
    entries = mass - rows.spread(tail_scale(rho, cfg)) * p
    return Coefficients(weight, entries, rows.sum(entries), mass_q, mass_p, rho, (unbounded > rho).to(weight.dtype))


def score_centered_loss(
    logits: Float[Tensor, "n v"],
    support: SupportTensors,
    advantages: Float[Tensor, " n"],
    cfg: EstimatorConfig,
    temperature: float | Float[Tensor, " n"] = 1.0,
    shard: VocabShard | None = None,
    *,
    consume: bool = False,
) -> tuple[Float[Tensor, " n"], dict[str, Float[Tensor, " n"]]]:
    """Loss and metrics of each token; row t of `logits` is the trainer's prediction of `support.sampled[t]`.

    logits: raw, any float dtype (float32 arithmetic; float64 stays float64), one vocabulary shard where `shard` says
    so. temperature: the sampler's. Reduce with the caller's mask and global denominators. The gradient is the closed
    form above; beyond the logits, O(n + nnz) numbers are kept for it. Non-finite logits give a non-finite loss.
    consume: nobody reads the logits after backward, so on a GPU their gradient may take their place in memory.
    """
    if logits.is_cuda and logits.dtype != torch.float64:
        from miles_ext.fused import fused_loss  # imports triton, which a machine without a GPU need not have

        return fused_loss(logits, support, advantages, cfg, temperature, shard, consume=consume)
    found = support_logits(
        logits, support.sampled, support.token_ids, support.rows, temperature,
        shard=shard, normalise=support.kind == "head", entropy=cfg.entropy and support.kind == "head",
    )  # fmt: skip
    return loss_from_support_logits(found, support, advantages, cfg, temperature)


def loss_from_support_logits(
    found: SupportLogits,
    support: SupportTensors,
    advantages: Float[Tensor, " n"],
    cfg: EstimatorConfig,
    temperature: float | Float[Tensor, " n"] = 1.0,
) -> tuple[Float[Tensor, " n"], dict[str, Float[Tensor, " n"]]]:
    """`score_centered_loss` from logits that were already gathered: by `support_logits`, or by a chunked or
    support-only LM head. `temperature` only scales the reported correction norm."""
    rows, complete = support.rows, support.kind == "complete"
    with torch.no_grad():
        dtype = found.sampled.dtype
        advantages = advantages.to(dtype)
        z = rows.fold(found.support)
        lq_sampled = support.sampled_logprobs.to(dtype)
        lse, present = found.lse, lq_sampled.isfinite()
        if complete:
            filled = rows.lengths > 0
            lse, present = torch.where(filled, rows.logsumexp(z), found.sampled), present & filled
        assert lse is not None
        lp, lp_sampled = z - rows.spread(lse), found.sampled - lse
        p, q = lp.exp(), rows.fold(support.logprobs.to(dtype)).exp()
        # Selected, not multiplied: what an absent token holds may be NaN.
        log_ratio = torch.where(present, lp_sampled - lq_sampled, 0.0)
        advantages = torch.where(present, advantages, 0.0)
        parts = coefficients(log_ratio, p, q, rows, support.kind, cfg)
        centering = cfg.centering != "off"
        c = parts.entries if centering else torch.zeros_like(parts.entries)
        c_total = parts.total if centering else torch.zeros_like(parts.total)

        policy = -advantages * parts.weight * lp_sampled
        correction = advantages * rows.sum(torch.where(c != 0, c * lp, 0.0))
        # Part of the gradient per raw logit that the correction contributes: (A/T) (c_j - sum(c) p_j).
        scale = advantages.abs() / temperature
        metrics = {
            "logprob": lp_sampled,
            "logprob_gap": log_ratio.abs(),
            "weight": parts.weight,
            "weight_clipped": clipped(log_ratio, cfg).to(dtype),
            "support_mass_q": parts.mass_q,
            "support_mass_p": parts.mass_p,
            "tail_ratio": parts.rho,
            "tail_ratio_bounded": parts.rho_bounded,
            "support_size": rows.lengths.to(dtype),
            "sampled_in_support": rows.sum((rows.fold(support.token_ids) == rows.spread(support.sampled)).to(dtype)),
            "pg_loss": policy,
            "correction_loss": correction,
            "correction_norm": scale * rows.sum((c - rows.spread(c_total) * p).square()).sqrt(),
            "correction_tail": scale * (c_total * (1 - parts.mass_p)).abs(),
        }
        if cfg.entropy:
            local = -rows.sum(torch.where(p > 0, p * lp, 0.0))
            metrics["entropy"] = local if found.entropy is None else found.entropy

        # Factors of the three kinds of logit in dL/dz; everything but the logits is a constant of the estimator.
        applied = cfg.centering == "on"
        pull = advantages * (parts.weight - c_total) if applied else advantages * parts.weight
        g_support = rows.spread(advantages) * c if applied else None
        if complete:
            local = rows.spread(pull) * p
            g_support = local if g_support is None else g_support + local
    loss = _ClosedForm.apply(
        found.sampled, found.support, found.lse, policy + correction if applied else policy,
        -advantages * parts.weight, g_support, None if complete else pull, rows,
    )  # fmt: skip
    return loss, metrics


class _ClosedForm(torch.autograd.Function):
    """Gives `value` the gradient g_sampled, g_support, g_lse in the three kinds of logit."""

    @staticmethod
    def forward(ctx, sampled, support, lse, value, g_sampled, g_support, g_lse, rows):
        ctx.save_for_backward(g_sampled, g_support, g_lse)
        ctx.rows = rows
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        g_sampled, g_support, g_lse = ctx.saved_tensors
        return (
            upstream * g_sampled,
            None if g_support is None else (ctx.rows.spread(upstream) * g_support).reshape(-1),
            None if g_lse is None else upstream * g_lse,
            None, None, None, None, None,
        )  # fmt: skip
