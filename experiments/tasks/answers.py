"""The task `text`: questions of files, asked in the target's chat template, answered by the last number of a response.

A response that did not end has no answer, whatever numbers it got to: its reward is 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random

from experiments.config import TaskConfig
from experiments.tasks.addition import Split
from experiments.tasks.text import Chat, TextProblem, read_preamble, read_problems

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class TextTask:
    """Implements `experiments.tasks.Task`. ValueError where a file has no problem, or an answer is no number."""

    def __init__(self, config: TaskConfig, target: Path) -> None:
        self._chat = Chat(target, read_preamble(config.preamble))
        self.stop_id, self._close, self._a_step = self._chat.stop, config.reward == "close", config.prompts
        self._files: dict[Split, tuple[TextProblem, ...]] = {}
        self._answers: dict[str, float] = {}
        files: dict[Split, Path | None] = {"train": config.train_file, "held_out": config.held_out_file}
        for split, file in files.items():
            if file is None:
                raise ValueError(f"task text without a file for {split}; set task.train_file and task.held_out_file")
            self._files[split] = read_problems(file, config.question_field, config.answer_field).problems
            for problem in self._files[split]:
                if (answer := last_number(problem.answer)) is None:
                    raise ValueError(f"{file}: the answer {problem.answer!r} holds no number; accepted: one a question")
                self._answers[problem.question] = answer

    def prompt(self, seed: int, step: int, index: int, split: Split) -> str:
        """See `Task`. Training goes through the file in an order of its own for each seed and pass."""
        problems = self._files[split]
        if split == "held_out":
            return problems[index % len(problems)].question
        turn, place = divmod(step * self._a_step + index, len(problems))
        order = list(range(len(problems)))
        Random(f"{seed} {turn}").shuffle(order)
        return problems[order[place]].question

    def encode(self, prompt: str) -> list[int]:
        return self._chat.encode(prompt)

    def reward(self, prompt: str, response: Sequence[int]) -> float:
        """1 for the answer; with `close` 1 less the relative error, at least 0."""
        if not response or response[-1] != self.stop_id:
            return 0.0
        found, wanted = last_number(self._chat.decode(response)), self._answers[prompt]
        if found is None or not self._close:
            return float(found == wanted)
        return max(0.0, 1.0 - abs(found - wanted) / max(1.0, abs(wanted)))


def last_number(text: str) -> float | None:
    """The last number of a text, commas between digits left out; None where there is none, or it has no float."""
    numbers = NUMBER.findall(text)
    if not numbers:
        return None
    value = float(numbers[-1].replace(",", ""))
    return value if math.isfinite(value) else None
