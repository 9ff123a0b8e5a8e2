"""Row `centering`: the expectation of the centred gradient under q, by exact enumeration of every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.evidence import Row, at_most, must_fail, report
from experiments.validate.settings import SETTINGS, Context
from miles_ext.score_centering import EstimatorConfig, SupportTensors, score_centered_loss

VOCAB = 160
MISMATCH = 0.5
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Prefix:
    """One prefix: the trainer's logits, the engine's law q over all V tokens, and what is recorded of it."""

    logits: Floats
    q: Floats
    ids: NDArray[np.int64]
    temperature: float
    kind: Any


def rows(context: Context) -> list[Row]:
    found = []
    for mode in ("none", "tis", "mis"):
        worst = {"complete": 0.0, "head": 0.0}
        drift, residual, size = [], [], 0
        for prefix in prefixes(context.pick(2, 10)):
            expected = expectation(prefix, mode, "on")
            predicted = predicted_residual(prefix, mode)
            worst[prefix.kind] = max(worst[prefix.kind], float(np.abs(expected - predicted).max()))
            plain = expectation(prefix, mode, "off")
            size += 1
            if prefix.kind == "complete":
                drift.append(float(np.abs(plain).max()))
            else:
                residual.append((float(np.abs(expected).sum()), float(np.abs(plain).sum())))
        left, without = np.mean(residual, axis=0)
        found += [
            at_most(f"centering/{mode}_complete", worst["complete"], 1e-14, "", "E_q of it is 0"),
            at_most(f"centering/{mode}_head", worst["head"], 1e-12, "", "E_q of it is the predicted residual"),
            must_fail(at_most(f"centering/control_{mode}", max(drift), 1e-14), "the uncentered gradient"),
            report(
                f"centering/{mode}_head_left", left / without, "of the drift", f"mean L1 {left:.3g} of {without:.3g}"
            ),
        ]
    return found


def prefixes(repeats: int) -> list[Prefix]:
    """Random prefixes in each of the settings, the engine off the trainer by noise."""
    rng, found = np.random.default_rng(11), []
    for setting in SETTINGS:
        spec = setting.spec(0)
        for _ in range(repeats):
            logits = 2.0 * rng.normal(size=VOCAB)
            z = (logits + MISMATCH * rng.normal(size=VOCAB)) / spec.temperature
            order = np.argsort(-z)
            q = np.exp(z - z.max())
            keep = VOCAB
            if spec.is_filtered:
                keep = spec.top_k or VOCAB
                mass = np.cumsum(q[order[:keep]]) / q[order[:keep]].sum()
                keep = min(keep, int(np.searchsorted(mass, spec.top_p)) + 1)
                q[order[keep:]] = 0.0
            recorded = order[: spec.head_size] if spec.capture == "head" else order[:keep]
            kind = "head" if spec.capture == "head" else "complete"
            found.append(Prefix(logits, q / q.sum(), recorded, spec.temperature, kind))
    return found


def expectation(prefix: Prefix, mode: Any, centering: Any) -> Floats:
    """sum_y q_y dL_y/dlogits [V], every token of the support taking its turn as the sampled one; advantage 1."""
    tokens = np.flatnonzero(prefix.q)
    count, width = len(tokens), len(prefix.ids)
    support = SupportTensors.from_arrays(
        np.tile(prefix.ids, count), np.tile(np.log(prefix.q[prefix.ids]), count), np.arange(count + 1) * width,
        tokens, np.log(prefix.q[tokens]), prefix.kind,
    )  # fmt: skip
    logits = torch.tensor(np.tile(prefix.logits, (count, 1)), requires_grad=True)
    cfg = EstimatorConfig(mode=mode, centering=centering, rho_max=1e6)
    loss, _ = score_centered_loss(logits, support, torch.ones(count, dtype=torch.float64), cfg, prefix.temperature)
    (loss * torch.from_numpy(prefix.q[tokens])).sum().backward()
    assert logits.grad is not None
    return logits.grad.sum(0).numpy()


def predicted_residual(prefix: Prefix, mode: str) -> Floats:
    """-(d on the tail - (sum d) p) / T: d is what the proportional tail of q gets wrong. Zero where all is recorded."""
    z = prefix.logits / prefix.temperature
    if prefix.kind == "complete":
        return np.zeros(len(z))
    p, q = np.exp(z - z.max()), prefix.q
    p /= p.sum()
    tail = np.ones(len(p), bool)
    tail[prefix.ids] = False
    modelled = p * q[tail].sum() / p[tail].sum()

    def mass(law: Floats) -> Floats:
        if mode == "none":
            return law
        if mode == "tis":
            return np.minimum(p, 2.0 * law)
        return np.where((0.5 * law <= p) & (p <= 5.0 * law), p, 0.0)

    d = np.where(tail, mass(q) - mass(modelled), 0.0)
    return -(d - d.sum() * p) / prefix.temperature
