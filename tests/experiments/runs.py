"""Small runs on disk for the tests of the evidence side: real records, no engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments.rollouts import rollout_file, save_rollout
from miles_ext.records import Commit, Completion, SpecCounters, Status, SupportKind, SupportRows, Trajectory

VOCAB = 24


def completion(
    rng: np.random.Generator, prompt: list[int], length: int, version: int = 1, kind: SupportKind = "complete"
) -> Completion:
    """A response of `length` tokens, each drawn from a random law of 2 to 6 tokens."""
    ids, logprobs, lengths, response, sampled = [], [], [], [], []
    for _ in range(length):
        size = int(rng.integers(2, 7))
        support = rng.choice(VOCAB, size, replace=False)
        law = -np.sort(-rng.dirichlet(np.ones(size))) * (1.0 if kind == "complete" else 0.9)
        pick = int(rng.choice(size, p=law / law.sum()))
        ids.append(support)
        logprobs.append(np.log(law))
        lengths.append(size)
        response.append(support[pick])
        sampled.append(np.log(law[pick]))
    rows = SupportRows(
        token_ids=np.concatenate(ids).astype(np.int32),
        logprobs=np.concatenate(logprobs).astype(np.float32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        sampled_logprobs=np.array(sampled, np.float32),
        kind=kind,
        status=np.full(length, Status.OK, np.uint8),
    )
    commit = np.full(length, Commit.DRAFT, np.uint8)
    commit[0] = Commit.PREFILL
    return Completion(
        prompt_ids=np.array(prompt, np.int32), response_ids=np.array(response, np.int32), support=rows, commit=commit,
        weight_version=np.full(length, version, np.int64), finish_reason="stop", text="säm", engine_id="worker-0",
        spec=SpecCounters(live_steps=3, proposed=9, accepted=4), draft_digest="d" * 32,
    )  # fmt: skip


def trajectories(
    seed: int, version: int = 1, kind: SupportKind = "complete", groups: int = 2, size: int = 2
) -> list[Trajectory]:
    """`groups` prompts, `size` responses each; prompts depend on `version` alone, responses on the seed too."""
    rng, found = np.random.default_rng(seed), []
    for group in range(groups):
        prompt = [1, 2 + version, 3 + group]
        for _ in range(size):
            response = completion(rng, prompt, int(rng.integers(2, 6)), version, kind)
            mask = np.ones(len(response), bool)
            found.append(
                Trajectory(
                    completion=response,
                    prompt_id=10 * version + group,
                    group=group,
                    reward=float(rng.integers(0, 2)),
                    loss_mask=mask,
                )  # fmt: skip
            )
    return found


def save(arm_dir: Path, step: int, rollout: list[Trajectory]) -> None:
    rewards = np.array([trajectory.reward for trajectory in rollout])
    save_rollout(rollout_file(arm_dir, step), step, rollout, rewards - rewards.mean())
