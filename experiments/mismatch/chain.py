"""A policy small enough to be enumerated: its estimator is the product's own, its drift is known exactly.

Six tokens of twelve are written one after another; one token is a hit, and three hits or more are a success. The policy
is a table of logits over (position, hits so far), so every expectation is a sum over 24 states:
the gradient that an estimator has in expectation, and its two parts, E_q[A] mu (drift) and Cov_q(A, w s) (signal).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles_ext.law import head, law, sample
from miles_ext.records import SupportRows
from miles_ext.score_centering import coefficients, weights
from miles_ext.seeds import Purpose, request_seed, uniforms
from miles_ext.segments import Segments
from rollout.embedded.transform import add_noise, quantise
from trainer.advantages import advantages
from trainer.batch import Batch, token_scale
from trainer.config import EstimatorSettings
from trainer.objective import SUMS, estimator, objective

LENGTH, VOCAB, HITS, NEEDED = 6, 12, 1, 3
STATES = LENGTH * (NEEDED + 1)
GROUP = 8
Payoff = Literal["raw", "group", "placebo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainArm:
    """noise: standard deviation of what is added to every logit of the rollout copy, one draw a seed. levels: int8 or
    int4 rounding of it. lag: updates. head: entries recorded of a law, 0 for all. payoff: `raw` is the reward (1 or
    -1), `group` subtracts the mean of 8, `placebo` gives 1 whatever was written: there is nothing to learn."""

    mode: Literal["none", "tis", "mis"] = "none"
    centering: Literal["on", "off", "diagnose"] = "on"
    payoff: Payoff = "raw"
    noise: float = 0.0
    levels: Literal["", "int8", "int4"] = ""
    lag: int = 0
    head: int = 0


def train_chain(
    arm: ChainArm, seed: int, steps: int, log: Callable[[int, dict[str, float]], None], *, rollouts: int = 128,
    lr: float = 24.0, every: int = 5,
) -> Tensor:  # fmt: skip
    """SGD on the product's objective; metrics of every `every`-th step go to `log`. Returns the table [24, 12]."""
    table = torch.zeros(STATES, VOCAB, dtype=torch.float64, requires_grad=True)
    settings = EstimatorSettings(mode=arm.mode, centering=arm.centering)
    past: deque[Tensor] = deque(maxlen=arm.lag + 1)
    for step in range(steps):
        past.append(table.detach().clone())
        q = law(rollout_copy(past[0], arm, seed))
        states, tokens, success = write(q, seed, step, rollouts)
        batch = make_batch(q, states, tokens, success, arm)
        loss, sums = objective(batch, estimator(settings), 1.0)(table[batch.rows], slice(0, len(batch)))
        loss.backward()
        assert table.grad is not None
        if step % every == 0 or step == steps - 1:
            found = dict(zip(SUMS, sums.tolist(), strict=True))
            drift, signal = gradient_parts(table.detach(), q, arm)
            log(step, {
                "rollout/raw_reward": float(success.mean()),
                "eval/trained_reward": success_rate(law(table.detach())),
                **{name: value / found["tokens"] for name, value in found.items() if "/" in name},
                "sc/drift_norm": float(drift.norm()), "sc/signal_norm": float(signal.norm()),
            })  # fmt: skip
        with torch.no_grad():
            table -= lr * table.grad
        table.grad = None
    return table.detach()


def rollout_copy(table: Tensor, arm: ChainArm, seed: int) -> Tensor:
    """The table that rollouts are sampled from."""
    noisy = add_noise(table, arm.noise, f"{seed}\0chain") if arm.noise else table
    return quantise(noisy, arm.levels) if arm.levels else noisy


def write(q: Tensor, seed: int, step: int, rollouts: int) -> tuple[NDArray, NDArray, NDArray]:
    """States and tokens, int64 [rollouts, LENGTH], and which succeeded. q: laws [STATES, VOCAB]."""
    seeds = np.array([request_seed(f"chain {seed}", step, 0, index) for index in range(rollouts)], np.uint64)
    hits, states, tokens = np.zeros(rollouts, np.int64), [], []
    for position in range(LENGTH):
        states.append(position * (NEEDED + 1) + hits)
        drawn = uniforms(seeds, np.full(rollouts, position), Purpose.TOKEN)
        tokens.append(sample(q[states[-1]], torch.from_numpy(drawn)).numpy())
        hits = np.minimum(hits + (tokens[-1] < HITS), NEEDED)
    return np.stack(states, 1), np.stack(tokens, 1), hits == NEEDED


def make_batch(q: Tensor, states: NDArray, tokens: NDArray, success: NDArray, arm: ChainArm) -> Batch:
    """The rollouts as the trainer's own batch: a row of the table is what a forward pass is to a model."""
    count, rows = len(states), states.reshape(-1)
    if arm.head:
        ids, logprobs = (array.numpy() for array in head(q, arm.head))
    else:
        ids, logprobs = np.tile(np.arange(VOCAB), (STATES, 1)), q.log().numpy()
    rewards = np.ones(count) if arm.payoff == "placebo" else 2.0 * success - 1
    values = advantages(rewards, np.arange(count) // GROUP, "group" if arm.payoff == "group" else "raw", std=False)
    support = SupportRows(
        token_ids=ids[rows].reshape(-1).astype(np.int32), logprobs=logprobs[rows].reshape(-1).astype(np.float32),
        offsets=np.arange(len(rows) + 1) * ids.shape[1], kind="head" if arm.head else "complete",
        sampled_logprobs=q.log().numpy()[rows, tokens.reshape(-1)].astype(np.float32),
        status=np.zeros(len(rows), np.uint8),
    )  # fmt: skip
    return Batch(
        input_ids=np.zeros((count, 1), np.int64), lengths=np.ones(count, np.int64), rows=rows, support=support,
        sampled_ids=tokens.reshape(-1), advantages=np.repeat(values, LENGTH),
        scale=np.repeat(token_scale([np.ones(LENGTH, bool)] * count, "token_mean"), LENGTH),
        trajectory=np.repeat(np.arange(count), LENGTH), token=np.tile(np.arange(LENGTH), count),
    )  # fmt: skip


def gradient_parts(table: Tensor, q: Tensor, arm: ChainArm) -> tuple[Tensor, Tensor]:
    """Expected ascent direction of a token in the table [STATES, VOCAB], by enumeration: (drift, signal).

    drift: what is left of E_q[A] mu when the arm's own correction is taken off; signal: Cov_q(A, w s).
    """
    cfg, p = estimator(EstimatorSettings(mode=arm.mode)), law(table)
    visited, value = visits(q), values(q)
    expected, after = payoff(value, q, arm)
    w = weights((p / q).log(), cfg)

    def score_sum(coefficient: Tensor) -> Tensor:
        """sum_v c_v (e_v - p) of each state."""
        return coefficient - coefficient.sum(-1, keepdim=True) * p

    mu = score_sum(q * w)
    taken = mu if arm.centering == "on" else torch.zeros_like(mu)
    if arm.centering == "on" and arm.head:
        ids, logprobs = head(q, arm.head)
        rows = Segments.from_offsets(np.arange(STATES + 1) * arm.head)
        kept = rows.fold(p.gather(1, ids.long()).reshape(-1)), rows.fold(logprobs.exp().reshape(-1))
        c = coefficients(torch.zeros(STATES, dtype=p.dtype), *kept, rows, "head", cfg).entries
        taken = score_sum(torch.zeros_like(p).scatter(1, ids.long(), c.reshape(STATES, arm.head)))
    share = visited[:, None] / LENGTH
    whole = share * score_sum(q * w * after)
    drift = share * expected[:, None] * mu
    return drift - share * expected[:, None] * taken, whole - drift


def payoff(value: Tensor, q: Tensor, arm: ChainArm) -> tuple[Tensor, Tensor]:
    """E_q[A | state] [STATES] and E_q[A | state, token] [STATES, VOCAB]. value: chance of success from a state."""
    if arm.payoff == "placebo":
        return torch.ones_like(value), torch.ones_like(q)
    after = 2 * next_value(value) - 1
    if arm.payoff == "raw":
        return 2 * value - 1, after
    rest = (GROUP - 1) / GROUP  # a response is part of the mean that is subtracted from it
    baseline = 2 * value[0] - 1
    return rest * (2 * value - 1 - baseline), rest * (after - baseline)


def next_value(value: Tensor) -> Tensor:
    """Chance of success after each token [STATES, VOCAB]."""
    after = torch.zeros(STATES, VOCAB, dtype=value.dtype)
    for state in range(STATES):
        position, hits = divmod(state, NEEDED + 1)
        for kind, rows in ((1, slice(0, HITS)), (0, slice(HITS, VOCAB))):
            reached = min(hits + kind, NEEDED)
            last = position == LENGTH - 1
            after[state, rows] = float(reached == NEEDED) if last else value[state - hits + NEEDED + 1 + reached]
    return after


def values(q: Tensor) -> Tensor:
    """Chance of success from each state under laws q, backwards from the last position."""
    value = torch.zeros(STATES, dtype=q.dtype)
    for _ in range(LENGTH):  # each pass settles one more position
        value = (q * next_value(value)).sum(-1)
    return value


def visits(q: Tensor) -> Tensor:
    """Chance that a response passes through each state."""
    reached, hit = torch.zeros(STATES, dtype=q.dtype), q[:, :HITS].sum(-1)
    reached[0] = 1
    for state in range(STATES - NEEDED - 1):
        hits = state % (NEEDED + 1)
        below = state - hits + NEEDED + 1
        reached[below + min(hits + 1, NEEDED)] += reached[state] * hit[state]
        reached[below + hits] += reached[state] * (1 - hit[state])
    return reached


def success_rate(q: Tensor) -> float:
    return float(values(q)[0])
