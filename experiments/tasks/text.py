"""Problems on real text: JSON lines with a question and an answer, asked in the chat template of the model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer


@dataclass(frozen=True)
class TextProblem:
    question: str
    answer: str


@dataclass(frozen=True)
class ProblemFile:
    """The sound problems of a file; `dropped` counts the other lines by reason."""

    problems: tuple[TextProblem, ...]
    dropped: Mapping[str, int]


def read_problems(file: Path, question: str = "question", answer: str = "answer") -> ProblemFile:
    """Problems of a JSON lines file; `question` and `answer` name its fields.

    A line that is no JSON object, whose question or answer is missing or empty, or whose question came before is
    counted and left out. ValueError where nothing is left.
    """
    if not file.is_file():
        raise ValueError(f"no file {file}; accepted: JSON lines with fields {question!r} and {answer!r}")
    found: dict[str, TextProblem] = {}
    dropped: Counter[str] = Counter()
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            dropped["no JSON"] += 1
            continue
        if not isinstance(entry, dict):
            dropped["no object"] += 1
        elif not (asked := _text(entry.get(question))):
            dropped[f"no {question}"] += 1
        elif not (wanted := _text(entry.get(answer))):
            dropped[f"no {answer}"] += 1
        elif asked in found:
            dropped["asked before"] += 1
        else:
            found[asked] = TextProblem(asked, wanted)
    if not found:
        raise ValueError(
            f"{file} holds no problem ({dict(dropped) or 'it is empty'}); accepted: JSON lines such as "
            f'{{"{question}": "1 + 2", "{answer}": "3"}}'
        )
    return ProblemFile(tuple(found.values()), dict(dropped))


def _text(value: Any) -> str:
    """Text of a field; numbers count as text, anything else is as good as missing."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return ""
    return str(value).strip()


def read_preamble(file: Path | None) -> list[dict[str, str]]:
    """Chat messages put before every question: a system message, worked examples. ValueError for any other form."""
    if file is None:
        return []
    try:
        messages = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({error}); accepted: a JSON list of chat messages") from error
    sound = isinstance(messages, list) and all(
        isinstance(message, dict) and set(message) == {"role", "content"} for message in messages
    )
    if not sound:
        raise ValueError(f"{file} is no list of chat messages; accepted: objects with `role` and `content` alone")
    return messages


class Chat:
    """The tokenizer of a model folder and the messages before each question."""

    def __init__(self, model: Path, preamble: Sequence[Mapping[str, str]] = ()) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        if self.tokenizer.chat_template is None or self.tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {model} has no chat template or no end token; accepted: a chat model")
        self.preamble = [dict(message) for message in preamble]
        self.stop: int = self.tokenizer.eos_token_id

    def encode(self, question: str) -> list[int]:
        """Token ids of the chat that ends where the model's answer begins."""
        messages = [*self.preamble, {"role": "user", "content": question}]
        asked = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.tokenizer(asked, add_special_tokens=False)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)
