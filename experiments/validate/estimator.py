"""Row `estimator`: float64 logit gradients of miles_ext.score_centering against two independent derivations."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.evidence import Row, at_least, at_most, must_fail
from experiments.oracle import Token, token_gradients
from experiments.validate.settings import Context
from miles_ext.capability import ArmKind
from miles_ext.logprobs import SupportLogits, support_logits
from miles_ext.score_centering import EstimatorConfig, SupportTensors, loss_from_support_logits

LIMIT, MIN_CHECKS = 1e-12, 200
CASES = Path(__file__).parents[2] / "tests" / "data" / "estimator.json"
MODES: tuple[Literal["none", "tis", "mis"], ...] = ("none", "tis", "mis")
MISMATCH = 0.3  # standard deviation of trainer minus engine logits, so that weights clip and corrections are large
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Check:
    """One token, how it is weighed, and its exact gradients [V]."""

    token: Token
    advantage: float
    temperature: float
    cfg: EstimatorConfig
    centered: Floats
    uncentered: Floats


def rows(context: Context) -> list[Row]:
    published = [_published(case) for case in json.loads((context.cases or CASES).read_text())["cases"]]
    recorded = [check for arm in context.engines.arms for check in engine_checks(context, arm)]
    found: list[Row] = []
    for name, checks in (("cases", published), ("engine_rows", recorded)):
        about = f"{len(checks)} tokens, modes {', '.join(MODES)}"
        plain = worst(checks, "centered", "off")
        found += [
            at_most(f"estimator/{name}", worst(checks, "centered"), LIMIT, "", f"{about}; exact gradients"),
            at_most(f"estimator/{name}_autograd", against_autograd(checks), LIMIT, "", f"{about}; a plain loss"),
            at_most(f"estimator/{name}_off", worst(checks, "uncentered", "off"), LIMIT, "", "centering off"),
            at_most(f"estimator/{name}_diagnose", worst(checks, "uncentered", "diagnose"), LIMIT, "", "diagnose"),
            must_fail(at_most(f"estimator/control_{name}_uncentered", plain, LIMIT), "the uncentered gradient"),
        ]
    heads = [check for check in recorded if check.token.kind == "head"]
    apart = worst(heads, "centered", shift=2.0**-9)
    found.append(must_fail(at_most("estimator/control_normaliser", apart, LIMIT), "head normalised unlike the label"))
    if context.cases is None:
        found.append(at_least("estimator/checks", len(published) + len(recorded), MIN_CHECKS, "tokens"))
    return found


def worst(checks: list[Check], exact: str, centering: Any = "on", shift: float = 0.0) -> float:
    """Largest coordinate error over the checks."""
    return max(float(np.abs(gradient(check, centering, shift) - getattr(check, exact)).max()) for check in checks)


def against_autograd(checks: list[Check]) -> float:
    return max(float(np.abs(gradient(check) - surrogate(check)).max()) for check in checks)


def gradient(check: Check, centering: Any = "on", shift: float = 0.0) -> Floats:
    """dL/dlogits [V] as the trainer's own functions backpropagate it.

    shift: sabotage for a control, added to the logprobs of the head but not of the label.
    """
    token = check.token
    support = SupportTensors.from_arrays(
        token.ids, np.asarray(token.logprobs, np.float64), np.array([0, len(token.ids)]), np.array([token.sampled]),
        np.array([token.sampled_logprob]), token.kind,
    )  # fmt: skip
    logits = torch.tensor(token.logits[None], dtype=torch.float64, requires_grad=True)
    found: SupportLogits = support_logits(
        logits, support.sampled, support.token_ids, support.rows, check.temperature, normalise=token.kind == "head"
    )
    found = found._replace(support=found.support + shift)
    advantage = torch.tensor([check.advantage], dtype=torch.float64)
    cfg = replace(check.cfg, centering=centering)
    loss, _ = loss_from_support_logits(found, support, advantage, cfg, check.temperature)
    return torch.autograd.grad(loss.sum(), logits)[0][0].numpy()


def surrogate(check: Check) -> Floats:
    """Autograd of -A [ w_y log p_y - sum_v q_v w_v log p_v ], q spelt out over all of the law's support."""
    token, cfg = check.token, check.cfg
    logits = torch.tensor(token.logits, dtype=torch.float64, requires_grad=True)
    ids = torch.from_numpy(np.asarray(token.ids, np.int64))
    recorded = torch.from_numpy(np.asarray(token.logprobs, np.float64)).exp()
    if token.kind == "complete":
        log_p, q = torch.log_softmax(logits[ids] / check.temperature, -1), recorded
        label = log_p[ids == token.sampled].squeeze()
    else:
        log_p = torch.log_softmax(logits / check.temperature, -1)
        tail = torch.ones_like(log_p).index_fill(0, ids, 0.0) * log_p.detach().exp()
        q = (tail * min(float((1 - recorded.sum()) / tail.sum()), cfg.rho_max)).index_put((ids,), recorded)
        label = log_p[token.sampled]

    def weight(ratio: torch.Tensor) -> torch.Tensor:
        if cfg.mode == "none":
            return torch.ones_like(ratio)
        if cfg.mode == "tis":
            return ratio.clamp(max=cfg.tis_clip)
        return ratio * ((ratio >= cfg.mis_low) & (ratio <= cfg.mis_high))

    p = log_p.detach().exp()
    w_y = weight((label.detach() - token.sampled_logprob).exp())
    loss = -check.advantage * (w_y * label - (q * weight(p / q) * log_p).sum())
    return torch.autograd.grad(loss, logits)[0].numpy()


def engine_checks(context: Context, arm: ArmKind) -> list[Check]:
    """Tokens recorded by a real engine in every setting and mode; the trainer's logits are the engine's plus noise."""
    rng, found = np.random.default_rng(7), []
    for setting in context.settings_of(context.engines.vocab_size):
        sample = context.sample(arm, setting)
        for mode in MODES:
            for _ in range(context.pick(2, 8)):
                which = int(rng.integers(len(sample.completions)))
                completion, watched = sample.completions[which], sample.watched[which]
                t = int(rng.integers(len(completion)))
                assert completion.support is not None
                row = completion.support[t : t + 1]
                token = Token(
                    logits=watched.logits[t].astype(np.float64) + MISMATCH * rng.normal(size=len(watched.logits[t])),
                    sampled=int(completion.response_ids[t]), sampled_logprob=float(row.sampled_logprobs[0]),
                    ids=row.token_ids, logprobs=row.logprobs, kind=row.kind,
                )  # fmt: skip
                cfg = EstimatorConfig(mode=mode)
                found.append(_check(token, float(rng.normal()), setting.temperature, cfg))
    return found


def _check(token: Token, advantage: float, temperature: float, cfg: EstimatorConfig) -> Check:
    exact = token_gradients(
        token, advantage, temperature, cfg.mode,
        tis_clip=cfg.tis_clip, mis_low=cfg.mis_low, mis_high=cfg.mis_high, rho_max=cfg.rho_max,
    )  # fmt: skip
    return Check(token, advantage, temperature, cfg, exact.centered, exact.uncentered)


def _published(case: dict[str, Any]) -> Check:
    token = Token(
        logits=np.array(case["logits"]), sampled=case["sampled"], sampled_logprob=case["sampled_logprob"],
        ids=np.array(case["support_ids"]), logprobs=np.array(case["support_logprobs"]), kind=case["kind"],
    )  # fmt: skip
    low, high = case["mis_bounds"]
    cfg = EstimatorConfig(mode=case["mode"], tis_clip=case["tis_clip"], mis_low=low, mis_high=high)
    centered, uncentered = np.array(case["logit_grad_centered"]), np.array(case["logit_grad_uncentered"])
    return Check(token, case["advantage"], case["temperature"], cfg, centered, uncentered)
