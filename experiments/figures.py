"""Figures of one rollout and one handoff: the same keys at every step, plain floats."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miles_ext.records import Commit, Completion, Status, Trajectory
from miles_ext.weights import HandoffReport


def rollout_figures(trajectories: Sequence[Trajectory], seconds: float) -> dict[str, float]:
    """Reward, lengths, throughput and speculation; seconds: wall time of the rollout."""
    completions = [trajectory.completion for trajectory in trajectories]
    lengths = np.array([len(completion) for completion in completions])
    return {
        "rollout/raw_reward": float(np.mean([trajectory.reward for trajectory in trajectories])),
        "rollout/response_length": float(lengths.mean()),
        "rollout/tokens_per_s": float(lengths.sum() / seconds),
        "rollout/truncated_fraction": float(np.mean([c.finish_reason == "length" for c in completions])),
        "rollout/overflow": float(sum(c.worst_status is Status.OVERFLOW for c in completions)),
        **speculation_figures(completions),
    }


def speculation_figures(completions: Sequence[Completion]) -> dict[str, float]:
    """accept_length: committed tokens a live verify step, bonus included and prefill not; 1 for regular decoding."""
    steps, proposed, accepted = (
        sum(getattr(completion.spec, name) for completion in completions)
        for name in ("live_steps", "proposed", "accepted")
    )
    committed = sum(int(np.count_nonzero(completion.commit != Commit.PREFILL)) for completion in completions)
    return {
        "spec/accept_length": committed / max(steps, 1),
        "spec/accept_rate": accepted / max(proposed, 1),
        "spec/verify_steps": float(steps),
    }


def handoff_figures(reports: Sequence[HandoffReport], draft_digests: set[str]) -> dict[str, float]:
    """seconds: the longest pause of an engine. draft_digests: as the engines reported them at the start."""
    return {
        "handoff/seconds": max(report.seconds for report in reports),
        "handoff/version": float(reports[0].version),
        "handoff/draft_unchanged": float({report.draft_digest for report in reports} == draft_digests),
    }
