"""What cannot be honoured exactly gets 400 with the reason; what asks for nothing is let through."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.rollout.served import PROMPT, Served, sc, serving

CHAT = {"messages": [{"role": "user", "content": PROMPT}]}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving("regular") as one:
        yield one


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"min_p": 0.1}, "temperature, top_k and top_p only"),
        ({"frequency_penalty": 0.5}, "temperature, top_k and top_p only"),
        ({"presence_penalty": -1}, "temperature, top_k and top_p only"),
        ({"repetition_penalty": 1.1}, "temperature, top_k and top_p only"),
        ({"logit_bias": {"3": 5}}, "temperature, top_k and top_p only"),
        ({"regex": "[0-9]+"}, "grammar"),
        ({"json_schema": "{}"}, "grammar"),
        ({"ebnf": "root ::= x"}, "grammar"),
        ({"structural_tag": "{}"}, "grammar"),
        ({"n": 2}, "its own seed"),
        ({"min_new_tokens": 3}, "end token"),
        ({"skip_special_tokens": False}, "special tokens"),
        ({"no_stop_trim": True}, "trimmed"),
        ({"temperatur": 1.0}, "unknown"),
        ({"temperature": "hot"}, 'temperature is "hot"'),
        ({"temperature": -1}, "temperature is -1"),
        ({"top_k": 0}, "accepted: -1 (off)"),
        ({"top_p": 0}, "top_p is 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 600}, "exceed the context"),
        ({"stop": ""}, "not empty"),
        ({"stop_token_ids": [512]}, "outside the vocabulary"),
        ({"stop_token_ids": [3], "ignore_eos": True}, "give one of them"),
        ({"custom_params": {"other": 1}}, "custom_params.other"),
        ({"custom_params": sc(v=2)}, "custom_params.sc.v is 2"),
        ({"custom_params": sc(order="top_p_first")}, "custom_params.sc.order"),
        ({"custom_params": sc(k=0)}, "head_size 0"),
        ({"custom_params": sc(k=513)}, "head_size 513 exceeds"),
        ({"custom_params": sc(seed=-1)}, "seed is -1"),
        ({"custom_params": {"sc": {"v": 1, "capture": "head"}}}, "Field required"),
        ({"custom_params": sc(), "top_k": 5}, "a head needs the unfiltered law"),
        ({"custom_params": sc("complete", 100)}, "max_support"),
        ({"custom_params": sc(), "temperature": 0}, "temperature 0 has no law"),
        ({"custom_params": sc(seed=1), "sampling_seed": 2}, "two seeds"),
    ],
)
def test_sampling_parameters(served: Served, sampling: dict[str, Any], reason: str) -> None:
    assert reason in served.refusal("/generate", {"text": PROMPT, "sampling_params": sampling})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"stream": True}, "not streamed"),
        ({"custom_logit_processor": "x"}, "recorded law"),
        ({"lora_path": "adapter"}, "adapters"),
        ({"logprob_start_len": 0, "return_logprob": True}, "prompt tokens"),
        ({"token_ids_logprob": [1]}, "capture the support"),
        ({"return_hidden_states": True}, "hidden states"),
        ({"sampling_logprobs_mode": "support"}, "without return_sampling_mask"),
        ({"top_logprobs_num": 2}, "without return_logprob"),
        ({"return_logprob": True, "top_logprobs_num": 513}, "513"),
        ({"return_logprob": True, "sampling_params": {"top_p": 0.9}}, "unfiltered law"),
        ({"return_logprob": True, "top_logprobs_num": 40, "sampling_params": {"custom_params": sc()}}, "head of 32"),
        ({"return_sampling_mask": True, "sampling_params": {"custom_params": sc()}}, "whole support"),
        ({"return_sampling_mask": True, "sampling_params": {"temperature": 0}}, "temperature 0"),
        ({"session_params": {"id": "1"}}, "sessions are not kept"),
        ({"input_ids": [1]}, "exactly one of text and input_ids"),
        ({"text": None}, "exactly one of text and input_ids"),
        ({"text": ""}, "the prompt is empty"),
        ({"text": 5}, "neither text nor a list of ids"),
        ({"text": None, "input_ids": [512]}, "neither text nor a list of ids"),
        ({"text": None, "input_ids": [1] * 512}, "leaves no room"),
        ({"text": ["1", "2"], "sampling_params": {"sampling_seed": 1}}, "repeat the same draws"),
        ({"text": ["1", "2"], "sampling_params": [{}]}, "1 sampling_params for 2"),
        ({"sampling_params": "greedy"}, "a JSON object"),
        ({"model": "another"}, 'model is "another"'),
        ({"zzz": 1}, "unknown"),
    ],
)
def test_generate_fields(served: Served, fields: dict[str, Any], reason: str) -> None:
    assert reason in served.refusal("/generate", {"text": PROMPT, **fields})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tools": [{"type": "function"}]}, "tools need"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "grammar"),
        ({"logprobs": True}, "return_logprob"),
        ({"stream": True}, "not streamed"),
        ({"n": 2}, "its own seed"),
        ({"min_p": 0.2}, "temperature, top_k and top_p only"),
        ({"custom_params": sc()}, "return_meta_info=true"),
        ({"return_sampling_mask": True}, "return_meta_info=true"),
        ({"return_meta_info": True, "session_params": {"return_meta_info": True}}, "give it once"),
        ({"messages": []}, "messages"),
        ({"continue_final_message": True}, "new message"),
    ],
)
def test_chat_fields(served: Served, fields: dict[str, Any], reason: str) -> None:
    assert reason in served.refusal("/v1/chat/completions", {**CHAT, **fields})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"return_sampling_mask": True}, "no support rows"),
        ({"custom_params": sc()}, "no support rows"),
        ({"session_params": {"custom_params": sc()}}, "no support rows"),
        ({"echo": True}, "not repeated"),
        ({"logprobs": 1}, "return_logprob"),
        ({"best_of": 4}, "one response"),
        ({"prompt": [PROMPT, PROMPT], "seed": 1}, "repeat the same draws"),
    ],
)
def test_completions_fields(served: Served, fields: dict[str, Any], reason: str) -> None:
    assert reason in served.refusal("/v1/completions", {"prompt": PROMPT, **fields})


def test_a_body_that_is_no_json_object(served: Served) -> None:
    for content in (b"{", b"[]", b"3", b"\xff"):
        answer = served.client.post("/generate", content=content)
        assert answer.status_code == 400 and answer.json()["error"]["message"]
    assert served.client.get("/nothing").json()["error"]["code"] == 404


def test_fields_that_ask_for_nothing_are_let_through(served: Served) -> None:
    """What sglang-router 0.3.2 adds to every request, and neutral values of what is refused otherwise."""
    added = {"model": None, "return_text_in_logprobs": False, "stream": False, "log_metrics": True, "no_logs": False}
    added |= {"return_hidden_states": False, "background": False, "return_bytes": False, "return_entropy": False}
    neutral = {"min_p": 0.0, "repetition_penalty": 1.0, "n": 1, "regex": None, "logit_bias": {}, "max_new_tokens": 2}
    served.post("/generate", {"text": PROMPT, "sampling_params": neutral, **added})
    chat = {"logprobs": False, "no_stop_trim": False, "ignore_eos": False, "continue_final_message": False}
    chat |= {"skip_special_tokens": True, "separate_reasoning": True, "stream_reasoning": True, "max_tokens": 2}
    served.post("/v1/chat/completions", {**CHAT, **chat, "tool_choice": "auto", "response_format": {"type": "text"}})
