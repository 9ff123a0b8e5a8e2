"""The addition task: worked solutions, splits, rewards and the tokenizer files."""

from pathlib import Path
from random import Random

import pytest
from transformers import AutoTokenizer

from experiments.models.tokenizer import save_tokenizer
from experiments.tasks import addition
from experiments.tasks.addition import Problem


def test_a_clean_solution_is_the_documented_example() -> None:
    assert Problem(785, 121).prompt == "785+121="
    assert addition.solution(Problem(785, 121), Random(0), slip=0.0) == "5+1+0=6c0;8+2+0=0c1;7+1+1=9c0;|0906\n"


def test_clean_solutions_always_earn_the_reward() -> None:
    for first in range(0, 1000, 7):
        for second in range(0, 1000, 31):
            question = Problem(first, second)
            worked = addition.solution(question, Random(0), slip=0.0)
            assert addition.reward(question.prompt, worked) == 1.0
            assert len(addition.encode(worked)) == addition.RESPONSE_LENGTH


def test_slips_carry_through_to_the_answer_and_cost_about_four_rewards_in_ten() -> None:
    random = Random(1)
    total = 0.0
    for index in range(4000):
        question = addition.problem(0, 0, index)
        worked = addition.solution(question, random)
        columns, answer = worked.rstrip("\n").split("|")
        written = [column.split("=")[1] for column in columns.split(";")[:3]]
        assert answer == written[2][2] + "".join(column[0] for column in reversed(written))
        total += addition.reward(question.prompt, worked)
    # (1 - 0.9 slip) ** 3 for the digits times (1 - 0.5 slip) ** 3 for the carries, and a little for luck.
    expected = (1 - 0.9 * addition.SLIP) ** 3 * (1 - 0.5 * addition.SLIP) ** 3
    assert total / 4000 == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize(
    "response",
    [
        "|0906",  # never ended
        "|0905\n",
        "|906\n",
        "|0906\n\n",
        "|0906\n785+121=",
        "0906\n",
        "|0906|0906\n",
        "|\n|0906\n",
        "",
    ],
)
def test_anything_but_the_exact_answer_earns_nothing(response: str) -> None:
    assert addition.reward("785+121=", "5+1+0=6c0;" + response) == 0.0
    assert addition.reward("785+121=", addition.encode(response)) == 0.0


def test_reward_reads_token_ids_and_text_alike() -> None:
    assert addition.reward("785+121=", "|0906\n") == addition.reward("785+121=", addition.encode("|0906\n")) == 1.0
    assert addition.reward("785+121=", [*addition.encode("|090"), 400, *addition.encode("6\n")]) == 0.0


def test_problems_are_a_function_of_seed_step_index_and_split() -> None:
    drawn = [addition.problem(3, 1, i) for i in range(50)]
    assert drawn == [addition.problem(3, 1, i) for i in range(50)]
    assert drawn[:2] == [Problem(848, 205), Problem(521, 311)]  # the same on every machine
    others = ([addition.problem(*key, i) for i in range(50)] for key in ((4, 1), (3, 2)))
    assert all(drawn != other for other in others)
    assert len(set(drawn)) > 45


def test_held_out_problems_never_meet_training_documents() -> None:
    held_out = {addition.problem(0, 0, i, "held_out").second for i in range(2000)}
    trained = {addition.problem(0, 0, i).second for i in range(5000)}
    assert len(held_out) > 80 and len(trained) > 800
    assert not held_out & trained
    running = addition.document(addition.problem(0, 0, 0), Random(0), 6)
    assert {line.split("=")[0].split("+")[1] for line in running.splitlines()} <= {f"{n:03d}" for n in trained}


def test_documents_are_running_sums() -> None:
    lines = addition.document(Problem(995, 972), Random(0), 3, slip=0.0).splitlines()
    assert [line[:8] for line in lines] == ["995+972=", "967+972=", "939+972="]
    assert [line[-4:] for line in lines] == ["1967", "1939", "1911"]


def test_foreign_characters_are_refused() -> None:
    with pytest.raises(ValueError, match="'x'"):
        addition.encode("12x")


def test_the_tokenizer_files_agree_with_the_task(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = addition.document(Problem(12, 999), Random(0), 2)
    assert tokenizer(text)["input_ids"] == addition.encode(text)
    assert tokenizer.decode(addition.encode(text)) == text
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (addition.EOS_ID, addition.PAD_ID)
    assert tokenizer.convert_tokens_to_ids("<|MASK|>") == addition.MASK_ID
    assert len(tokenizer) == addition.VOCAB_SIZE
    assert len({tokenizer.decode([i]) for i in range(addition.VOCAB_SIZE)}) == addition.VOCAB_SIZE
    chat = [{"role": "user", "content": "785+121="}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == "785+121="
