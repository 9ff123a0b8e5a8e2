"""Prompts as requests, and completions as trajectories: what is asked depends on seed and step, never on the arm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from experiments.config import ExperimentConfig
from experiments.tasks import Task, open_task
from experiments.tasks.addition import Split
from miles_ext.records import Completion, Status, Trajectory
from miles_ext.sampling import SamplingSpec
from miles_ext.seeds import request_seed
from rollout.engine import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """Prompts of one step, `samples` requests each, prompt by prompt.

    Example: asked = Questions.training(config, seed=0, step=3); asked.trajectories(pool.generate(asked.requests), 512)
    """

    task: Task
    prompts: list[str]
    samples: int
    first_id: int
    requests: list[Request]

    @classmethod
    def training(cls, config: ExperimentConfig, seed: int, step: int) -> Self:
        """The prompts of a step of training, with the laws captured."""
        task, count = config.task, config.task.prompts
        spec = config.sampling.spec(0)
        return cls._ask(config, f"train {seed}", step, count, task.samples, spec, seed, "train")

    @classmethod
    def held_out(cls, config: ExperimentConfig, seed: int) -> Self:
        """The held-out problems, one sample each, drawn as in training and nothing captured: the same at every call."""
        spec = replace(config.sampling.spec(0), capture="off")
        return cls._ask(config, f"held out {seed}", 0, config.task.eval_problems, 1, spec, seed, "held_out")

    @classmethod
    def _ask(
        cls, config: ExperimentConfig, run: str, step: int, count: int, samples: int, spec: SamplingSpec, seed: int,
        split: Split,
    ) -> Self:  # fmt: skip
        task = open_task(config.task, config.model.target)
        prompts = [task.prompt(seed, step, index, split) for index in range(count)]
        encoded = [np.array(task.encode(prompt), np.int32) for prompt in prompts]
        requests = [
            Request(
                request_id=f"{run} step {step} prompt {i} sample {j}", prompt_ids=encoded[i],
                spec=replace(spec, seed=request_seed(run, step, i, j)),
                max_new_tokens=config.task.max_new_tokens, stop_ids=(task.stop_id,),
            )
            for i in range(count)
            for j in range(samples)
        ]  # fmt: skip
        return cls(task=task, prompts=prompts, samples=samples, first_id=step * count, requests=requests)

    def rewards(self, completions: Sequence[Completion]) -> list[float]:
        """One a completion, in the order of the requests."""
        return [
            self.task.reward(self.prompts[index // self.samples], completion.response_ids.tolist())
            for index, completion in enumerate(completions)
        ]

    def trajectories(self, completions: Sequence[Completion], vocab_size: int) -> list[Trajectory]:
        """What training needs; the loss mask leaves out tokens whose law is not sound, and decides nothing else.

        SupportError where a row breaks the contract, whichever engine sent it: it is trained on nowhere.
        """
        return [
            Trajectory(
                completion=completion.check(vocab_size), prompt_id=self.first_id + index // self.samples,
                group=index // self.samples, reward=reward, loss_mask=_sound(completion),
            )
            for index, (completion, reward) in enumerate(zip(completions, self.rewards(completions), strict=True))
        ]  # fmt: skip


def _sound(completion: Completion) -> np.ndarray:
    rows = completion.support
    return np.ones(len(completion), bool) if rows is None else rows.status == Status.OK
