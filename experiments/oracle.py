"""Independent float64 answers: the law of a token and the gradient of its loss, one token at a time in plain numpy.

Nothing here shares code with the engine, the estimator or each other; clarity goes before speed. The audit and the
proof table compare what ran against these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

TAIL_FLOOR, RHO_MAX = 1e-6, 10.0  # bounds of the tail ratio that the estimator states for float32


def token_law(logits: ArrayLike, temperature: float, top_k: int, top_p: float, order: str) -> tuple[Floats, float]:
    """(probabilities float64 [V], margin): how far the mass of any cutoff lies from top_p, inf without that filter.

    logits: one row as the engine had it; ties are ties of these very numbers. A margin near 0 means that rounding may
    rightly decide either way.
    """
    z = np.asarray(logits, np.float64)
    keep = np.isfinite(z)
    law = np.exp((z - z[keep].max()) / temperature)
    law[~keep] = 0.0
    if 0 < top_k < len(z):
        keep &= z >= np.sort(z)[-top_k]
    margin = math.inf
    if top_p < 1:
        measured = law / (law[keep].sum() if order == "top_k_first" else law.sum())
        levels, level = np.unique(z[keep], return_inverse=True)
        mass = np.bincount(level, weights=measured[keep])
        more_likely = np.append(np.cumsum(mass[::-1])[-2::-1], 0.0)
        keep &= np.isin(z, levels[more_likely < top_p])
        margin = float(np.abs(more_likely - top_p).min())
    law = np.where(keep, law, 0.0)
    return law / law.sum(), margin


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One recorded token. logits: [V], raw trainer logits of its row. ids, logprobs: its recorded entries, log q."""

    logits: Floats
    sampled: int
    sampled_logprob: float
    ids: NDArray[np.integer]
    logprobs: NDArray[np.floating]
    kind: Literal["complete", "head"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """dL/dlogits [V], centred, not centred, and centred with the wrong sign; all for the same token.

    edge: distance of log(p/q) of any recorded token from a bound at which the weight jumps, inf where none does.
    """

    centered: Floats
    uncentered: Floats
    flipped: Floats
    edge: float


def token_gradients(
    token: Token, advantage: float, temperature: float, mode: str, *,
    tis_clip: float = 2.0, mis_low: float = 0.5, mis_high: float = 5.0,
    tail_floor: float = 0.0, rho_max: float = math.inf,
) -> Gradients:  # fmt: skip
    """Gradients of L = -A [ w_y log p_y - sum_v q_v w_v log p_v ] in the raw logits, from dense laws.

    For a head, q is spelt out over the whole vocabulary (recorded entries, and p times the ratio of the tails
    elsewhere) instead of being folded into the head's coefficients.
    """
    z = np.asarray(token.logits, np.float64) / temperature
    if token.kind == "complete":
        members = np.zeros(len(z), bool)
        members[token.ids] = True
        z = np.where(members, z, -np.inf)
    p = np.exp(z - z.max())
    p /= p.sum()
    q = np.zeros(len(p))
    if token.kind == "head":
        recorded = np.exp(np.asarray(token.logprobs, np.float64))
        outside = np.ones(len(p), bool)
        outside[token.ids] = False
        tail_q, tail_p = max(1 - recorded.sum(), tail_floor), max(p[outside].sum(), tail_floor)
        q = p * min(tail_q / tail_p, rho_max) if tail_p > 0 else q
    q[token.ids] = np.exp(np.asarray(token.logprobs, np.float64))

    def weight(p_v: Floats, q_v: Floats) -> Floats:
        ratio = np.divide(p_v, q_v, out=np.zeros_like(p_v), where=q_v > 0)
        if mode == "none":
            return np.ones_like(ratio)
        if mode == "tis":
            return np.minimum(ratio, tis_clip)
        return np.where((ratio >= mis_low) & (ratio <= mis_high), ratio, 0.0)

    w_y = weight(p[[token.sampled]], np.exp(np.array([token.sampled_logprob], np.float64)))[0]
    score_y = -p
    score_y[token.sampled] += 1
    mass = q * weight(p, q)
    expected_score = mass - mass.sum() * p
    scale = -advantage / temperature
    edge = math.inf
    if mode == "mis":
        with np.errstate(divide="ignore"):
            ratios = np.append(np.log(p[token.ids]) - token.logprobs, np.log(p[token.sampled]) - token.sampled_logprob)
        edge = float(min(np.abs(ratios - math.log(bound)).min() for bound in (mis_low, mis_high)))
    return Gradients(
        centered=scale * (w_y * score_y - expected_score),
        uncentered=scale * w_y * score_y,
        flipped=scale * (w_y * score_y + expected_score),
        edge=edge,
    )
