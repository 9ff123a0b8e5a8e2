"""Three-digit addition, worked column by column, one character a token.

    785+121=5+1+0=6c0;8+2+0=0c1;7+1+1=9c0;|0906

Each column writes digit + digit + carry = result digit, c, carry out; the answer after the bar is copied from the
columns, and a newline ends the response. Demonstrators slip: a result digit or a carry is now and then re-drawn
uniformly and everything after it follows from what was written. A model that imitates them is right about 6 times
in 10 when sampled at temperature 1, which is what reinforcement learning then has to mend.

Documents of several problems are running sums: the next problem adds the same number to the last three digits of
the answer before. Responses that run on past the newline therefore stay inside the training distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

import xxhash

CHARACTERS = "0123456789+=c;|\n"
VOCAB_SIZE = 512
EOS_ID = stop_id = CHARACTERS.index("\n")
PAD_ID, MASK_ID, UNKNOWN_ID = 500, 501, 502
SLIP = 0.11
RESPONSE_LENGTH = 36

Split = Literal["train", "held_out"]


@dataclass(frozen=True)
class Problem:
    """first + second, each 0 to 999."""

    first: int
    second: int

    @property
    def prompt(self) -> str:
        return f"{self.first:03d}+{self.second:03d}="

    @property
    def answer(self) -> str:
        return f"{self.first + self.second:04d}"


def _addends(split: Split) -> list[int]:
    """The second operands of a split; one in eight is held out, and running sums keep theirs, so splits never meet."""
    held_out = [xxhash.xxh3_64_intdigest(f"addend {n}".encode()) % 8 == 0 for n in range(1000)]
    return [n for n in range(1000) if held_out[n] == (split == "held_out")]


_ADDENDS: dict[Split, list[int]] = {"train": _addends("train"), "held_out": _addends("held_out")}


def problem(seed: int, step: int, index: int, split: Split = "train") -> Problem:
    """The problem at (seed, step, index) of a split, the same on every machine."""
    key = xxhash.xxh3_64_intdigest(f"{split} {seed} {step} {index}".encode())
    second, first = divmod(key >> 3, 1000)
    addends = _ADDENDS[split]
    return Problem(first, addends[second % len(addends)])


def prompt(seed: int, step: int, index: int, split: Split) -> str:
    """Of `problem`."""
    return problem(seed, step, index, split).prompt


def encode(text: str) -> list[int]:
    """Token ids of a text in the task's alphabet; ValueError for a character outside it."""
    foreign = sorted(set(text) - set(CHARACTERS))
    if foreign:
        raise ValueError(f"characters {foreign} are outside the alphabet {CHARACTERS!r}")
    return [CHARACTERS.index(char) for char in text]


def decode(ids: Sequence[int]) -> str:
    """Text of token ids; an id that is no character becomes '?'."""
    return "".join(CHARACTERS[i] if 0 <= i < len(CHARACTERS) else "?" for i in ids)


def reward(prompt: str, response: str | Sequence[int]) -> float:
    """1.0 when the response ends at its first newline and what stands after its bar is the sum, else 0.0."""
    text = response if isinstance(response, str) else decode(response)
    first, second = prompt.removesuffix("=").split("+")
    answer = Problem(int(first), int(second)).answer
    body, _, rest = text.partition("\n")
    return float(text.endswith("\n") and not rest and body.partition("|")[2] == answer)


def solution(question: Problem, random: Random, slip: float = SLIP) -> str:
    """A worked response, newline included; each computed digit and carry is re-drawn with probability `slip`."""
    columns, answer, carry = [], "", 0
    for place in (1, 10, 100):
        left, right = question.first // place % 10, question.second // place % 10
        total = left + right + carry
        digit = random.randrange(10) if random.random() < slip else total % 10
        carry_out = random.randrange(2) if random.random() < slip else total // 10
        columns.append(f"{left}+{right}+{carry}={digit}c{carry_out};")
        answer, carry = f"{digit}{answer}", carry_out
    return f"{''.join(columns)}|{carry}{answer}\n"


def document(question: Problem, random: Random, problems: int, slip: float = SLIP) -> str:
    """A running sum of `problems` worked problems that starts with `question`."""
    text = ""
    for _ in range(problems):
        worked = solution(question, random, slip)
        text += question.prompt + worked
        question = Problem(int(worked[-4:-1]), question.second)
    return text
