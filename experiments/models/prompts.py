"""Where the prompts of draft training come from: the addition task, a text file, or questions asked in a chat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoTokenizer

from experiments.models.sample import pad
from experiments.tasks import addition, text

Prompts = tuple[torch.Tensor, torch.Tensor]  # int64 [B, P], padded on the right, and lengths int64 [B]


class Source(NamedTuple):
    """batch(round) gives the prompts of a round; `stop` ends a response (None: responses run on)."""

    batch: Callable[[int], Prompts]
    held_out: Prompts
    stop: int | None


def addition_source(rows: int, held_out: int, seed: int) -> Source:
    def prompts(index: int, count: int, split: addition.Split) -> Prompts:
        return pad([addition.encode(addition.problem(seed, index, row, split).prompt) for row in range(count)])

    return Source(lambda index: prompts(index, rows, "train"), prompts(0, held_out, "held_out"), None)


def line_source(file: Path, held_out: Path, target: Path, rows: int, held_out_rows: int) -> Source:
    """Prompts from files, one a line, in turn."""
    tokenizer = AutoTokenizer.from_pretrained(target)

    def lines(file: Path) -> list[list[int]]:
        found = [ids for line in file.read_text().splitlines() if (ids := tokenizer(line)["input_ids"])]
        if not found:
            raise ValueError(f"{file} holds no prompt; give one prompt a line")
        return found

    return Source(_turns(lines(file), rows), _turns(lines(held_out), held_out_rows)(0), None)


def chat_source(
    file: Path, held_out: Path, preamble: Path | None, target: Path, rows: int, held_out_rows: int
) -> Source:
    """Questions of JSON lines files (see experiments/tasks/text.py), asked in the target's chat template, in turn."""
    chat = text.Chat(target, text.read_preamble(preamble))

    def prompts(file: Path) -> list[list[int]]:
        return [chat.encode(problem.question) for problem in text.read_problems(file).problems]

    return Source(_turns(prompts(file), rows), _turns(prompts(held_out), held_out_rows)(0), chat.stop)


def _turns(found: Sequence[Sequence[int]], rows: int) -> Callable[[int], Prompts]:
    return lambda index: pad([found[(index * rows + row) % len(found)] for row in range(rows)])
