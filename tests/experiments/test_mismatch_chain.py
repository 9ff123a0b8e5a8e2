"""The chain's enumeration against a brute-force sum over every sequence, and the product's estimator against both."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from experiments.mismatch import chain
from experiments.mismatch.chain import ChainArm, gradient_parts, make_batch, rollout_copy, train_chain, values, write
from miles_ext.law import law
from trainer.config import EstimatorSettings
from trainer.objective import estimator, objective

SMALL = {"LENGTH": 3, "VOCAB": 4, "NEEDED": 2, "STATES": 9}
WEIGHTS = {
    "none": lambda r: 1.0, "tis": lambda r: min(r, 2.0), "mis": lambda r: r if 0.5 <= r <= 5 else 0.0,
}  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, torch.Tensor]:
    """A chain of 64 sequences: trainer's table and the rollouts' laws, far enough apart for every mode to clip."""
    for name, value in SMALL.items():
        monkeypatch.setattr(chain, name, value)
    generator = torch.Generator().manual_seed(4)
    table = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    return table, law(table + 1.2 * torch.randn(9, 4, generator=generator, dtype=torch.float64))


def sequences(q: torch.Tensor):
    """(probability, states, tokens, success) of all 64."""
    for tokens in itertools.product(range(4), repeat=3):
        hits, states, probability = 0, [], 1.0
        for position, token in enumerate(tokens):
            states.append(3 * position + hits)
            probability *= float(q[states[-1], token])
            hits = min(hits + (token < chain.HITS), 2)
        yield probability, states, tokens, hits == 2


def brute_force(table: torch.Tensor, q: torch.Tensor, mode: str, payoff: str) -> tuple[np.ndarray, np.ndarray]:
    """E_q[A w s] and E_q[A] mu a token, [9, 4], from the definitions alone."""
    p = np.exp(table.numpy()) / np.exp(table.numpy()).sum(-1, keepdims=True)
    mean = sum(probability * (2.0 * success - 1) for probability, *_, success in sequences(q))

    def advantage(success: bool) -> float:
        reward = 2.0 * success - 1
        return {"raw": reward, "placebo": 1.0, "group": (reward - mean) * 7 / 8}[payoff]

    def score(state: int, token: int) -> np.ndarray:
        found = -p[state]
        found = found.copy()
        found[token] += 1
        return WEIGHTS[mode](p[state, token] / float(q[state, token])) * found

    whole, drift = np.zeros((9, 4)), np.zeros((9, 4))
    mu = [sum(float(q[s, v]) * score(s, v) for v in range(4)) for s in range(9)]
    for probability, states, tokens, success in sequences(q):
        for state, token in zip(states, tokens, strict=True):
            whole[state] += probability * advantage(success) * score(state, token) / 3
            drift[state] += probability * advantage(success) * mu[state] / 3
    return whole, drift


@pytest.mark.parametrize("mode", ["none", "tis", "mis"])
@pytest.mark.parametrize("payoff", ["raw", "group", "placebo"])
def test_drift_and_signal_are_those_of_the_sum_over_all_sequences(small, mode, payoff):
    table, q = small
    whole, drift = brute_force(table, q, mode, payoff)
    control = gradient_parts(table, q, ChainArm(mode=mode, centering="diagnose", payoff=payoff))
    centered = gradient_parts(table, q, ChainArm(mode=mode, payoff=payoff))
    assert np.abs(control[0].numpy() - drift).max() < 1e-14 < 1e-4 < np.abs(drift).max()
    assert np.abs((control[0] + control[1]).numpy() - whole).max() < 1e-14
    assert centered[0].abs().max() == 0 and torch.equal(centered[1], control[1])
    assert float(values(q)[0]) == pytest.approx(sum(p for p, *_, success in sequences(q) if success), abs=1e-14)


@pytest.mark.parametrize("mode", ["none", "tis", "mis"])
@pytest.mark.parametrize("head", [0, 2])
@pytest.mark.parametrize("centering", ["on", "diagnose"])
def test_the_products_estimator_has_the_enumerated_expectation(small, mode, head, centering):
    """All 64 sequences as one batch, each weighed by its probability: the gradient is the expectation itself."""
    table, q = small
    arm = ChainArm(mode=mode, head=head, centering=centering)
    probability, states, tokens, success = (np.array(column) for column in zip(*sequences(q), strict=True))
    batch = make_batch(q, states, tokens, success, arm)
    batch = dataclasses.replace(batch, scale=np.repeat(probability, 3) / 3)
    table.requires_grad_(True)
    settings = EstimatorSettings(mode=mode, centering=centering)
    objective(batch, estimator(settings), 1.0)(table[batch.rows], slice(0, len(batch)))[0].backward()
    drift, signal = gradient_parts(table.detach(), q, arm)
    assert table.grad is not None
    assert (table.grad + drift + signal).abs().max() < 1e-6, "laws are recorded in float32"
    assert drift.abs().max() > 1e-4 or centering == "on"


def test_rollouts_follow_the_laws_and_repeat():
    q = law(torch.randn(chain.STATES, chain.VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    states, tokens, success = write(q, 3, 0, 4000)
    assert np.array_equal(tokens, write(q, 3, 0, 4000)[1]) and not np.array_equal(tokens, write(q, 4, 0, 4000)[1])
    assert (states[:, 0] == 0).all()
    drawn, first = np.bincount(tokens[:, 0], minlength=chain.VOCAB) / 4000, q[0].numpy()
    error = np.sqrt(first * (1 - first) / 4000)
    assert (np.abs(drawn - first) < 4.5 * error).all()
    assert abs(success.mean() - float(values(q)[0])) < 4.5 * 0.5 / 4000**0.5


def test_the_control_trains_as_plain_does_and_drifts_where_there_is_nothing_to_learn():
    def trained(**settings):
        found: list[dict[str, float]] = []
        table = train_chain(
            ChainArm(noise=1.0, payoff="placebo", **settings), 0, 60, lambda step, metrics: found.append(metrics)
        )
        return table, found

    (off, _), (diagnose, control), (_, on) = (trained(centering=word) for word in ("off", "diagnose", "on"))
    assert torch.equal(off, diagnose)
    assert control[-1]["train/entropy"] < 0.3 < 1.8 < on[-1]["train/entropy"], "of 2.48 at the start"
    assert max(step["sc/drift_norm"] for step in on) == 0 and control[0]["sc/correction_norm"] > 0


def test_the_rollout_copy_is_as_declared():
    table = torch.randn(chain.STATES, chain.VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    noisy = rollout_copy(table, ChainArm(noise=0.5), 3) - table
    assert 0.4 < float(noisy.std()) < 0.6 and torch.equal(noisy, rollout_copy(table, ChainArm(noise=0.5), 3) - table)
    assert torch.equal(rollout_copy(table, ChainArm(lag=4), 3), table)
    assert 0 < float((rollout_copy(table, ChainArm(levels="int4"), 3) - table).abs().max()) < 0.5
