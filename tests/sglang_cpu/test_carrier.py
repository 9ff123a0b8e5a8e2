"""Fields that a router drops, carried in `session_params`, on sglang's own request classes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from miles_ext.sampling import SamplingSpec
from miles_ext.sglang_plugin.carrier import around_handle_request
from miles_ext.wire import request_fields

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("plugin")]
ROWS = {"sc": request_fields(SamplingSpec(top_k=4))}


def normalized(**fields: Any) -> Any:
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(**fields)
    request.normalize_batch_and_arguments()
    return request


def test_every_prompt_of_a_request_gets_them() -> None:
    carried = {"custom_params": ROWS}
    one = normalized(text="a", sampling_params={"top_k": 4}, session_params=carried)
    assert one.sampling_params == {"top_k": 4, **carried} and one.session_params is None
    two = normalized(text=["a", "b"], session_params=carried)
    assert [params["custom_params"] for params in two.sampling_params] == [ROWS, ROWS]


def test_what_belongs_to_a_session_stays() -> None:
    request = normalized(text="a", session_params={"id": "s", "custom_params": ROWS})
    assert request.session_params == {"id": "s"} and request.sampling_params["custom_params"] == ROWS


def test_another_place_of_the_same_fields_is_refused() -> None:
    with pytest.raises(ValueError, match="give them once"):
        normalized(text="a", sampling_params={"custom_params": {}}, session_params={"custom_params": ROWS})


def test_chat_gets_them_and_completions_refuse_them() -> None:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest

    session = {"custom_params": ROWS, "return_meta_info": True, "return_token_ids": True}
    chat = ChatCompletionRequest(messages=[{"role": "user", "content": "a"}], model="m", session_params=session)
    serving = SimpleNamespace(create_error_response=lambda message: message)
    assert around_handle_request(lambda *_: "served", serving, chat, None) == "served"
    assert chat.custom_params == ROWS and chat.return_meta_info and chat.return_token_ids
    plain = CompletionRequest(model="m", prompt="a", custom_params=ROWS)
    assert "/v1/completions has no place" in asyncio.run(around_handle_request(lambda *_: None, serving, plain, None))
