"""Writes the sample files beside it: sums of small numbers, to be added one by one in full sentences.

    python -m experiments.tasks.running_sum.write

An instruct model of 135 million parameters keeps to the form, whose sentences are predictable and whose sums are not
easy for it: a long response with a few uncertain tokens. `train.jsonl` and `held_out.jsonl` have 4 to 10 numbers,
`long.jsonl` has 10, more than fit into 256 tokens. No question is in two files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

FOLDER = Path(__file__).parent
LARGEST = 5
SYSTEM = "Add the numbers one by one."
EXAMPLES = ([4, 2, 5, 1], [3, 1, 5, 2, 4, 4, 1, 5, 3])  # a small model stops where its examples stop
SIZES = {"held_out": (256, 4, 10), "long": (256, 10, 10), "train": (2048, 4, 10)}  # problems, fewest and most numbers


def question(numbers: Sequence[int]) -> str:
    return " + ".join(map(str, numbers))


def worked(numbers: Sequence[int]) -> str:
    """The response that the examples show."""
    lines, total = [], 0
    for step, number in enumerate(numbers, 1):
        after = total + number
        lines.append(
            f"Step {step}: the total is {total}, the next number is {number}, and {total} + {number} = {after}."
        )
        total = after
    return "\n".join([*lines, f"Answer: {total}"])


def preamble() -> list[dict[str, str]]:
    messages = [{"role": "system", "content": SYSTEM}]
    for numbers in EXAMPLES:
        messages.append({"role": "user", "content": question(numbers)})
        messages.append({"role": "assistant", "content": worked(numbers)})
    return messages


def main() -> None:
    random, asked = Random(0), {question(numbers) for numbers in EXAMPLES}
    for name, (count, fewest, most) in SIZES.items():
        lines = []
        while len(lines) < count:
            numbers = [random.randint(1, LARGEST) for _ in range(random.randint(fewest, most))]
            if (text := question(numbers)) not in asked:
                asked.add(text)
                lines.append(json.dumps({"question": text, "answer": str(sum(numbers))}))
        (FOLDER / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (FOLDER / "preamble.json").write_text(json.dumps(preamble(), indent=1) + "\n")


if __name__ == "__main__":
    main()
