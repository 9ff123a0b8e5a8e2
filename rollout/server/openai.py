"""The OpenAI dialect: POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from typing import Any, ClassVar, Literal

from pydantic import Field

from miles_ext.errors import RequestError
from rollout.server.fields import lift
from rollout.server.front import Answer, Front, prompts
from rollout.server.params import SamplingFields, Wants, make_request

_TOOLS = "tools need a grammar and a parser, and there is none"
_NO_ROWS = (
    "/v1/completions returns no support rows, and sglang ignores the request for them there without a word: "
    "use /generate, or /v1/chat/completions with return_meta_info=true"
)


class OpenAIBody(SamplingFields):
    """Fields of both routes."""

    model: str | None = None
    max_tokens: int | None = None
    seed: int | None = None
    rid: str | None = None
    return_token_ids: bool = False

    OFF: ClassVar = SamplingFields.OFF | {
        "stream": (False, "responses are not streamed"),
        "stream_options": (None, "responses are not streamed"),
        "min_tokens": (0, "holding back the end token changes the law"),
        "response_format": ({"type": "text"}, "a grammar changes the law at every token and is not recorded"),
        "return_hidden_states": (False, "hidden states are not returned"),
        "custom_logit_processor": (None, "it would change the recorded law"),
        "lora_path": (None, "adapters are not served"),
    }
    INERT: ClassVar = frozenset({"user", "log_metrics", "no_logs", "custom_labels", "priority", "extra_key"})


class CompletionBody(OpenAIBody):
    prompt: Any

    OFF: ClassVar = OpenAIBody.OFF | {
        "logprobs": (None, "use /generate with return_logprob"),
        "echo": (False, "the prompt is not repeated"),
        "best_of": (1, "one response a request"),
        "suffix": (None, "text is only continued"),
        "return_sampling_mask": (False, _NO_ROWS),
        "sampling_logprobs_mode": (None, _NO_ROWS),
    }


class ChatBody(OpenAIBody):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] = {}
    tool_choice: Literal["none", "auto"] = "none"
    return_meta_info: bool = False
    return_sampling_mask: bool = False
    sampling_logprobs_mode: Literal["selected", "support"] | None = None

    OFF: ClassVar = OpenAIBody.OFF | {
        "logprobs": (False, "use /generate with return_logprob"),
        "top_logprobs": (None, "use /generate with return_logprob"),
        "tools": ([], _TOOLS),
        "functions": (None, _TOOLS),
        "continue_final_message": (False, "a chat asks for a new message"),
        "reasoning_effort": (None, "templates are steered with chat_template_kwargs"),
    }
    # The last two steer a parser of reasoning, which this server has not; sglang-router always sends them.
    INERT: ClassVar = OpenAIBody.INERT | {"parallel_tool_calls", "separate_reasoning", "stream_reasoning"}


async def completions(front: Front, body: Any) -> dict[str, Any]:
    fields = CompletionBody.read(lift(body, "request"), "request")
    sc = fields.custom_params.sc
    if sc is not None and sc.capture != "off":
        raise RequestError(f"custom_params.sc.capture is {sc.capture!r}: {_NO_ROWS}")
    ids, many = prompts(front.model, fields.prompt, "prompt")
    if len(ids) > 1 and (fields.seed is not None or sc is not None):
        raise RequestError(f"one seed for {len(ids)} prompts would repeat the same draws; send them one by one")
    answers = await _answers(front, ids, fields, Wants(), "cmpl", fields.max_tokens, default_new_tokens=16)
    choices: list[dict[str, Any]] = [{"text": a.text, "logprobs": None} for a in answers]
    if fields.return_token_ids:
        for choice, answer in zip(choices, answers, strict=True):
            choice |= {"prompt_token_ids": answer.prompt_ids, "token_ids": answer.ids}
    return _response(front, "text_completion", answers, choices)


async def chat(front: Front, body: Any) -> dict[str, Any]:
    fields = ChatBody.read(lift(body, "request"), "request")
    sc = fields.custom_params.sc
    captures = fields.return_sampling_mask or (sc is not None and sc.capture != "off")
    if captures and not fields.return_meta_info:
        raise RequestError("support rows come in choices[].meta_info: set return_meta_info=true")
    if fields.sampling_logprobs_mode is not None and not fields.return_sampling_mask:
        raise RequestError("sampling_logprobs_mode without return_sampling_mask=true; give both or neither")
    wants = Wants(mask=fields.return_sampling_mask, mask_logprobs=fields.sampling_logprobs_mode or "selected")
    tokens = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    ids = front.model.chat_ids(fields.messages, fields.chat_template_kwargs)
    (answer,) = await _answers(front, [ids], fields, wants, "chatcmpl", tokens)
    choice: dict[str, Any] = {"message": {"role": "assistant", "content": answer.text}, "logprobs": None}
    if fields.return_token_ids:
        choice |= {"prompt_token_ids": answer.prompt_ids, "response_token_ids": answer.ids}
    if fields.return_meta_info:
        choice["meta_info"] = answer.meta
    return _response(front, "chat.completion", [answer], [choice])


async def _answers(
    front: Front,
    ids: list[Any],
    fields: OpenAIBody,
    wants: Wants,
    prefix: str,
    max_new_tokens: int | None,
    default_new_tokens: int | None = None,
) -> list[Answer]:
    front.model.require_name(fields.model)
    requests = [
        make_request(
            front.model,
            one,
            fields,
            wants,
            request_id=fields.rid or f"{prefix}-{uuid.uuid4().hex}",
            seed=fields.seed,
            max_new_tokens=max_new_tokens,
            default_new_tokens=default_new_tokens,
        )
        for one in ids
    ]
    return await front.answer(requests, wants)


def _response(front: Front, kind: str, answers: list[Answer], choices: list[dict[str, Any]]) -> dict[str, Any]:
    for i, (choice, answer) in enumerate(zip(choices, answers, strict=True)):
        reason = answer.meta["finish_reason"]
        choice |= {"index": i, "finish_reason": reason["type"], "matched_stop": reason.get("matched")}
    prompt = sum(a.meta["prompt_tokens"] for a in answers)
    completion = sum(a.meta["completion_tokens"] for a in answers)
    return {
        "id": answers[0].meta["id"],
        "object": kind,
        "created": int(time.time()),
        "model": front.model.name,
        "choices": choices,
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
        "metadata": {"weight_version": answers[0].meta["weight_version"]},
    }
