"""The task `text`: what is asked when, and what a response is worth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.config import TaskConfig
from experiments.tasks import addition, open_task
from experiments.tasks.answers import last_number

TARGET = Path("experiments/models/tiny/target").absolute()
QUESTIONS = {"103+204=": "0307", "500+250=": "0750", "999+001=": "1,000"}


def task(folder: Path, **changes: object) -> TaskConfig:
    file = folder / "questions.jsonl"
    file.write_text("\n".join(json.dumps({"question": q, "answer": a}) for q, a in QUESTIONS.items()))
    return TaskConfig.model_validate(
        {"name": "text", "train_file": file, "held_out_file": file, "prompts": 2, **changes}
    )


def test_a_pass_asks_every_question_once_and_seeds_differ(tmp_path: Path) -> None:
    opened = open_task(task(tmp_path), TARGET)
    # Three steps of two prompts are two passes over three questions.
    asked = [opened.prompt(0, step, index, "train") for step in range(3) for index in range(2)]
    assert sorted(asked[:3]) == sorted(asked[3:]) == sorted(QUESTIONS)
    orders = {tuple(opened.prompt(seed, 0, index, "train") for index in range(2)) for seed in range(20)}
    assert len(orders) > 3
    held_out = [opened.prompt(seed, 0, index, "held_out") for seed in (0, 1) for index in range(4)]
    assert held_out == [*QUESTIONS, "103+204="] * 2


def test_the_prompt_is_the_question_in_the_chat_template(tmp_path: Path) -> None:
    preamble = tmp_path / "preamble.json"
    preamble.write_text(json.dumps([{"role": "user", "content": "1+2;"}]))
    opened = open_task(task(tmp_path, preamble=preamble), TARGET)
    assert opened.encode("103+204=") == addition.encode("1+2;103+204=")  # the tiny template joins messages
    assert opened.stop_id == addition.EOS_ID


@pytest.mark.parametrize(
    ("response", "exact", "close"),
    [
        ("3+4+0=7c0;|0307\n", 1, 1),
        ("|0300\n", 0, 1 - 7 / 307),
        ("|0307", 0, 0),  # did not end: no answer yet
        ("|\n", 0, 0),
        ("|9999\n", 0, 0),  # further off than the answer is from 0
    ],
)
def test_rewards(tmp_path: Path, response: str, exact: float, close: float) -> None:
    ids = addition.encode(response)
    assert open_task(task(tmp_path), TARGET).reward("103+204=", ids) == exact
    assert open_task(task(tmp_path, reward="close"), TARGET).reward("103+204=", ids) == pytest.approx(close)


def test_numbers_of_a_text() -> None:
    assert [last_number(text) for text in ("a 3, then 1,200.5.", "-7", "no", "9" * 400)] == [1200.5, -7, None, None]


def test_an_answer_without_a_number_is_refused(tmp_path: Path) -> None:
    config = task(tmp_path, answer_field="question")
    Path(str(config.train_file)).write_text('{"question": "how?"}')
    with pytest.raises(ValueError, match="'how\\?' holds no number"):
        open_task(config, TARGET)
