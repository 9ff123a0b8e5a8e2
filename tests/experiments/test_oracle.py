"""The oracle itself, against the published cases and against finite differences."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.oracle import Token, token_gradients, token_law

DATA = Path(__file__).parents[1] / "data"


def cases(name: str) -> list[dict]:
    return json.loads((DATA / name).read_text())["cases"]


def test_laws_of_the_cases():
    for case in cases("filters.json"):
        logits = np.array(case["logits"], np.float32)
        law, _ = token_law(logits, case["temperature"], case["top_k"], case["top_p"], case["filter_order"])
        assert np.flatnonzero(law).tolist() == case["support"], case["name"]
        assert np.abs(law[case["support"]] - case["probs"]).max() < 1e-6, case["name"]


def test_the_margin_tells_rows_that_rounding_may_decide():
    assert token_law(np.log([0.5, 0.3, 0.2]), 1.0, 0, 0.8, "joint")[1] < 1e-12
    assert token_law(np.log([0.5, 0.3, 0.2]), 1.0, 0, 0.6, "joint")[1] == pytest.approx(0.1)
    assert token_law(np.log([0.5, 0.3, 0.2]), 1.0, 2, 1.0, "joint")[1] == np.inf


def token_of(case: dict) -> Token:
    return Token(
        logits=np.array(case["logits"]), sampled=case["sampled"], sampled_logprob=case["sampled_logprob"],
        ids=np.array(case["support_ids"]), logprobs=np.array(case["support_logprobs"]), kind=case["kind"],
    )  # fmt: skip


def test_gradients_of_the_cases():
    for case in cases("estimator.json"):
        low, high = case["mis_bounds"]
        found = token_gradients(
            token_of(case), case["advantage"], case["temperature"], case["mode"],
            tis_clip=case["tis_clip"], mis_low=low, mis_high=high,
        )  # fmt: skip
        assert np.abs(found.centered - case["logit_grad_centered"]).max() < 1e-12
        assert np.abs(found.uncentered - case["logit_grad_uncentered"]).max() < 1e-12


def test_gradient_is_the_derivative_of_the_surrogate():
    case = cases("estimator.json")[1]
    token, temperature, advantage = token_of(case), case["temperature"], case["advantage"]
    assert case["kind"] == "head" and case["mode"] == "none"
    found = token_gradients(token, advantage, temperature, "none")

    def log_p(logits):
        z = logits / temperature
        return z - np.log(np.exp(z).sum())

    p = np.exp(log_p(token.logits))
    outside = np.ones(len(p), bool)
    outside[token.ids] = False
    q = np.where(outside, p * (1 - np.exp(token.logprobs).sum()) / p[outside].sum(), 0.0)
    q[token.ids] = np.exp(token.logprobs)
    for j in range(len(p)):
        step = np.zeros(len(p))
        step[j] = 1e-6
        rise = log_p(token.logits + step) - log_p(token.logits - step)
        slope = -advantage * (rise[token.sampled] - q @ rise) / 2e-6
        assert slope == pytest.approx(found.centered[j], abs=1e-8)


def test_mis_reports_how_near_a_jump_is():
    token = Token(
        logits=np.log([0.5, 0.3, 0.2]), sampled=0, sampled_logprob=np.log(0.5),
        ids=np.arange(3), logprobs=np.log([0.5, 0.3 / 5, 0.44]), kind="complete",
    )  # fmt: skip
    assert token_gradients(token, 1.0, 1.0, "mis").edge < 1e-12
    assert token_gradients(token, 1.0, 1.0, "tis").edge == np.inf
