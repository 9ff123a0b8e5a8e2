"""Requests to a test server, and its answers decoded as a client decodes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_ext.records import Commit, SupportRows
from miles_ext.sampling import SamplingSpec
from miles_ext.wire import request_fields, unpack
from tests.sglang_cpu.server import Server

VOCABULARY = 512
EOS = 15
BLOCK = 8
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13], [3, 4], [1, 10, 2, 11, 3, 10]]


@dataclass
class Answer:
    prompt: list[int]
    ids: list[int]
    rows: SupportRows
    commit: NDArray[np.uint8]
    meta: dict[str, Any]
    text: str


def params(spec: SamplingSpec, **more: Any) -> dict[str, Any]:
    """sglang's sampling_params for a spec."""
    return {
        "temperature": spec.temperature,
        "top_k": spec.top_k or -1,
        "top_p": spec.top_p,
        "custom_params": {"sc": request_fields(spec)},
        **more,
    }


def ask(server: Server, prompts: list[list[int]], spec: SamplingSpec, **more: Any) -> list[Answer]:
    body = {"input_ids": prompts, "sampling_params": params(spec, **more)}
    answers = []
    for prompt, item in zip(prompts, server.generate(body), strict=True):
        rows, commit = unpack(item["meta_info"]["sc"])
        answers.append(Answer(prompt, item["output_ids"], rows, commit, item["meta_info"], item["text"]))
    return answers


def check(answer: Answer) -> None:
    """The contract of one answer: a valid row and one commit kind a token."""
    answer.rows.check(np.array(answer.ids), VOCABULARY)
    assert len(answer.commit) == len(answer.ids) == answer.meta["completion_tokens"]


def check_commits(answer: Answer, arm: str) -> None:
    """Prefill first and after a retraction; else the arm's own kinds: plain tokens, or drafts that a bonus closes."""
    kinds = answer.commit.tolist()
    assert kinds[0] == Commit.PREFILL
    # A request put back before its first token was committed draws that one again: one prefill for two.
    assert 1 <= kinds.count(Commit.PREFILL) <= 1 + answer.meta["num_retractions"]
    if arm == "regular":
        assert set(kinds) <= {Commit.PREFILL, Commit.PLAIN}
        return
    run = 0
    for kind in kinds[1:]:
        if kind == Commit.PREFILL:
            assert run == 0
        elif kind == Commit.DRAFT:
            run += 1
        else:
            assert kind == (Commit.FULL_BONUS if run == BLOCK - 1 else Commit.REJECT_BONUS)
            run = 0
    assert run < BLOCK
