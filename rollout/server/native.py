"""The native dialect: POST /generate."""

from __future__ import annotations

import uuid
from typing import Any, ClassVar, Literal

from pydantic import Field

from miles_ext.errors import RequestError
from rollout.server.fields import Body, lift
from rollout.server.front import Answer, Front, prompts
from rollout.server.params import CustomParams, NativeSampling, Wants, make_request

DEFAULT_NEW_TOKENS = 128  # sglang's


class GenerateBody(Body):
    """Accepted fields of /generate. `session_params` may carry those that a gateway drops (see fields.lift)."""

    text: Any = None
    input_ids: Any = None
    sampling_params: Any = Field(default_factory=dict)
    rid: str | list[str] | None = None
    model: str | None = None
    return_logprob: bool = False
    top_logprobs_num: int = Field(0, ge=0)
    return_text_in_logprobs: bool = False
    return_sampling_mask: bool = False
    sampling_logprobs_mode: Literal["selected", "support"] | None = None

    OFF: ClassVar = {
        "stream": (False, "responses are not streamed"),
        "logprob_start_len": (-1, "logprobs of prompt tokens are not recorded"),
        "token_ids_logprob": (None, "logprobs of chosen ids are not recorded; capture the support"),
        "return_flat_raw_top_logprobs": (False, "the packed rows in meta_info.sc are the flat form"),
        "return_flat_raw_output_top_logprobs": (False, "the packed rows in meta_info.sc are the flat form"),
        "return_hidden_states": (False, "hidden states are not returned"),
        "return_entropy": (False, "entropy is not returned; capture the support"),
        "return_routed_experts": (False, "there are no experts"),
        "return_bytes": (False, "responses are text"),
        "background": (False, "responses are not stored"),
        "custom_logit_processor": (None, "it would change the recorded law"),
        "lora_path": (None, "adapters are not served"),
        "lora_id": (None, "adapters are not served"),
        "image_data": (None, "prompts are text"),
        "video_data": (None, "prompts are text"),
        "audio_data": (None, "prompts are text"),
        "input_embeds": (None, "prompts are text or ids"),
    }
    INERT: ClassVar = frozenset({"log_metrics", "no_logs", "custom_labels", "extra_key", "conversation_id", "priority"})


async def generate(front: Front, body: Any) -> Any:
    """The answer to one prompt, or a list of answers to a batch."""
    lifted = lift(body, "request")
    carried = lifted.pop("custom_params", None)
    fields = GenerateBody.read(lifted, "request")
    model, wants = front.model, _wants(fields)
    model.require_name(fields.model)
    if (fields.text is None) == (fields.input_ids is None):
        raise RequestError("request: give exactly one of text and input_ids")
    ids, many = prompts(model, fields.input_ids if fields.text is None else fields.text, "request")
    params = _sampling(fields.sampling_params, carried, len(ids), many)
    names = _names(fields.rid, len(ids), many)
    requests = [
        make_request(
            model,
            one,
            sampling,
            wants,
            request_id=name,
            seed=sampling.sampling_seed,
            max_new_tokens=sampling.max_new_tokens,
            default_new_tokens=DEFAULT_NEW_TOKENS,
        )
        for one, sampling, name in zip(ids, params, names, strict=True)
    ]
    answers = [_as_json(answer) for answer in await front.answer(requests, wants)]
    return answers if many else answers[0]


def _as_json(answer: Answer) -> dict[str, Any]:
    return {"text": answer.text, "output_ids": answer.ids, "meta_info": answer.meta}


def _wants(fields: GenerateBody) -> Wants:
    if fields.sampling_logprobs_mode is not None and not fields.return_sampling_mask:
        raise RequestError("request: sampling_logprobs_mode without return_sampling_mask=true; give both or neither")
    if fields.top_logprobs_num and not fields.return_logprob:
        raise RequestError("request: top_logprobs_num without return_logprob=true; give both or neither")
    return Wants(
        mask=fields.return_sampling_mask,
        mask_logprobs=fields.sampling_logprobs_mode or "selected",
        logprob=fields.return_logprob,
        top=fields.top_logprobs_num,
        text=fields.return_text_in_logprobs,
    )


def _sampling(value: Any, carried: Any, count: int, many: bool) -> list[NativeSampling]:
    """One set of parameters a prompt. Prompts of a batch must not share a seed: their draws would be the same."""
    if isinstance(value, list):
        if not many or len(value) != count or carried is not None:
            raise RequestError(
                f"request: {len(value)} sampling_params for {count} prompt(s); accepted: one object for all, or a list "
                "with one a prompt of a batch, and then no custom_params in session_params"
            )
        return [NativeSampling.read(one, f"sampling_params[{i}]") for i, one in enumerate(value)]
    params = NativeSampling.read(value, "sampling_params")
    if carried is not None:
        if "custom_params" in params.model_fields_set:
            raise RequestError("request: custom_params in session_params and in sampling_params; give it once")
        params = params.model_copy(update={"custom_params": CustomParams.read(carried, "custom_params")})
    if count > 1 and (params.sampling_seed is not None or params.custom_params.sc is not None):
        raise RequestError(
            f"sampling_params: one seed for {count} prompts would repeat the same draws; "
            "send a list with one object, and one seed, a prompt"
        )
    return [params] * count


def _names(rid: str | list[str] | None, count: int, many: bool) -> list[str]:
    if isinstance(rid, list):
        if not many or len(rid) != count:
            raise RequestError(f"request: {len(rid)} rids for {count} prompt(s)")
        return rid
    name = rid or uuid.uuid4().hex
    return [f"{name}_{i}" for i in range(count)] if many else [name]
