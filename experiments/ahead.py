"""Sampling ahead of training: everything that is asked of the pool, one call after another on a thread of its own."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from experiments.config import ExperimentConfig
from experiments.questions import Questions
from miles_ext.errors import WeightError
from miles_ext.records import Trajectory
from miles_ext.weights import HandoffReport
from rollout.pool import RolloutPool

FIRST_VERSION = 1  # the trainer's weights before any update, handed over so that q is proved to be theirs


@dataclass(frozen=True, slots=True)
class Sampled:
    """The rollout of one step. seconds: wall time of its sampling."""

    step: int
    trajectories: list[Trajectory]
    seconds: float


class Ahead:
    """The rollouts of a run in order, up to `max_staleness` of them sampled before they are trained on.

    With a staleness of s the rollout of step k is issued behind the handoff of step k - s - 1, so it is sampled from
    the weights before step k - s, whatever a clock says: a run repeats itself, a continued one goes on the same way.
    Training waits for a handoff s - 1 steps later. With s = 0 nothing overlaps.

    first: step of the next rollout. ready: those that a checkpoint held. served: reports of the handoff before `first`.
    """

    def __init__(
        self, pool: RolloutPool, config: ExperimentConfig, seed: int, vocab_size: int, first: int,
        ready: Sequence[Sampled], served: list[HandoffReport],
    ) -> None:  # fmt: skip
        self._pool, self._config, self._seed, self._vocab_size = pool, config, seed, vocab_size
        self._thread = ThreadPoolExecutor(1, "rollout")
        self._rollouts = deque(_done(sampled) for sampled in ready)
        self._next = first + len(ready)
        self._handoffs: deque[Future[list[HandoffReport]]] = deque()
        self._served = served

    def take(self, step: int) -> Sampled:
        """The rollout of `step`; those that may run ahead are issued. WeightError where it is of other weights."""
        while self._next <= min(step + self._config.max_staleness, self._config.steps - 1):
            self._rollouts.append(self._thread.submit(self._sample, self._next))
            self._next += 1
        sampled = self._rollouts.popleft().result()
        require_version(sampled, expected_version(self._config, step))
        return sampled

    def hand_over(self, deliver: Callable[[], list[HandoffReport]]) -> list[HandoffReport]:
        """Deliver behind what was issued; the reports of the newest handoff that training has waited for."""
        self._handoffs.append(self._thread.submit(deliver))
        while len(self._handoffs) > max(0, self._config.max_staleness - 1):
            self._served = self._handoffs.popleft().result()
        return self._served

    def call(self, job: Callable[..., Any], *args: Any) -> Any:
        """The result of a call that uses the pool, behind what was issued."""
        return self._thread.submit(job, *args).result()

    def settled(self) -> list[Sampled]:
        """Wait for all that was issued; the rollouts that are still to be trained on."""
        while self._handoffs:
            self._served = self._handoffs.popleft().result()
        return [rollout.result() for rollout in self._rollouts]

    def _sample(self, step: int) -> Sampled:
        asked = Questions.training(self._config, self._seed, step)
        started = time.perf_counter()
        completions = self._pool.generate(asked.requests)
        seconds = time.perf_counter() - started
        return Sampled(step, asked.trajectories(completions, self._vocab_size), seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After a failure nothing is waited for: closing the pool ends the call that is under way."""
        self._thread.shutdown(wait=error is None, cancel_futures=True)


def expected_version(config: ExperimentConfig, step: int) -> int:
    """Of the weights that the rollout of `step` is sampled from: as stale as the settings say, no older or newer."""
    return FIRST_VERSION + max(0, step - config.max_staleness - config.rollout.mismatch.lag)


def require_version(sampled: Sampled, version: int) -> None:
    """WeightError where a token was sampled from other weights than `version`."""
    versions = np.unique(np.concatenate([t.completion.weight_version for t in sampled.trajectories])).tolist()
    if versions != [version]:
        raise WeightError(
            f"the rollout of step {sampled.step} was sampled from weights of versions {versions}; accepted: "
            f"{version} alone; it was not trained on; look for an engine that others update too"
        )


def staleness_figures(trajectories: Sequence[Trajectory], step: int) -> dict[str, float]:
    """Handoffs between the weights that tokens were sampled from and those that train on them, a token."""
    behind = FIRST_VERSION + step - np.concatenate([t.completion.weight_version for t in trajectories])
    return {"rollout/staleness_mean": float(behind.mean()), "rollout/staleness_max": float(behind.max())}


def _done(sampled: Sampled) -> Future[Sampled]:
    future: Future[Sampled] = Future()
    future.set_result(sampled)
    return future
