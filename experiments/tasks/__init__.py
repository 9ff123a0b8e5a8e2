"""What is asked and how answers are rewarded: `open_task` finds the task that the settings name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from experiments.tasks import addition

if TYPE_CHECKING:
    from experiments.config import TaskConfig


class Task(Protocol):
    """stop_id: the token that ends a response."""

    stop_id: int

    def prompt(self, seed: int, step: int, index: int, split: addition.Split) -> str:
        """The text at (seed, step, index) of a split, the same on every machine."""
        ...

    def encode(self, prompt: str) -> list[int]:
        """Token ids that the engine continues."""
        ...

    def reward(self, prompt: str, response: Sequence[int]) -> float:
        """Of the response's token ids, the stop token included where it came."""
        ...


def open_task(config: TaskConfig, target: Path) -> Task:
    """target: model folder, whose tokenizer and chat template the task `text` uses. ValueError for bad files."""
    return cast(Task, addition) if config.name == "addition" else _text_task(config.model_dump_json(), target)


@cache
def _text_task(settings: str, target: Path) -> Task:
    from experiments.config import TaskConfig
    from experiments.tasks.answers import TextTask  # transformers: not for tasks without text

    return TextTask(TaskConfig.model_validate_json(settings), target)
