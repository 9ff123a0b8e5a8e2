"""From sampling parameters and wanted fields to the engine's request."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from miles_ext.errors import RequestError
from miles_ext.sampling import Capture, FilterOrder, SamplingSpec
from rollout.engine import Request
from rollout.server.fields import Body
from rollout.server.model import Model

MASK_CAP = 4096  # sglang's default of --sampling-mask-max-tokens
_LAW = "the recorded law knows temperature, top_k and top_p only"
_GRAMMAR = "a grammar changes the law at every token and is not recorded"


class Sc(Body):
    """`custom_params.sc`, as `miles_ext.wire.request_fields` writes it."""

    v: Literal[1]
    capture: Capture
    k: int
    order: FilterOrder
    seed: int


class CustomParams(Body):
    sc: Sc | None = None


class SamplingFields(Body):
    """What every dialect spells the same way."""

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    custom_params: CustomParams = CustomParams()

    OFF: ClassVar = {
        "min_p": (0, _LAW),
        "frequency_penalty": (0, _LAW),
        "presence_penalty": (0, _LAW),
        "repetition_penalty": (1, _LAW),
        "logit_bias": ({}, _LAW),
        "n": (1, "one response a request; send several requests, each with its own seed"),
        "regex": (None, _GRAMMAR),
        "ebnf": (None, _GRAMMAR),
        "json_schema": (None, _GRAMMAR),
        "structural_tag": (None, _GRAMMAR),
        "stop_regex": (None, "stops are token ids and plain strings"),
        "beam_width": (None, "beams are no samples"),
        "watermark": (None, "a watermark changes the law"),
        "skip_special_tokens": (True, "stop strings are searched in text without special tokens"),
        "spaces_between_special_tokens": (True, "special tokens leave no text"),
        "no_stop_trim": (False, "text is trimmed before a stop, and the ids are whole"),
    }


class NativeSampling(SamplingFields):
    """`sampling_params` of /generate."""

    max_new_tokens: int | None = None
    sampling_seed: int | None = None

    OFF: ClassVar = SamplingFields.OFF | {
        "min_new_tokens": (0, "holding back the end token changes the law"),
        "stream_interval": (None, "responses are not streamed"),
    }


@dataclass(frozen=True)
class Wants:
    """Stock fields of the response, beside the packed rows. top: likeliest tokens a row, of the unfiltered law."""

    mask: bool = False
    mask_logprobs: Literal["selected", "support"] = "selected"
    logprob: bool = False
    top: int = 0
    text: bool = False


def make_request(
    model: Model,
    prompt_ids: NDArray[np.int32],
    fields: SamplingFields,
    wants: Wants,
    *,
    request_id: str,
    seed: int | None,
    max_new_tokens: int | None,
    default_new_tokens: int | None = None,
) -> Request:
    """The engine's request, checked against model and context. Raises RequestError.

    seed: None draws one. max_new_tokens: None takes `default_new_tokens`, or what the context still holds.
    """
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop
    if stops and ("" in stops or not model.has_tokenizer):
        raise RequestError(f"stop is {stops}; accepted: strings that are not empty, for a model with a tokenizer")
    room = model.context_length - len(prompt_ids)
    if max_new_tokens is not None and max_new_tokens > room > 0:
        raise RequestError(
            f"{max_new_tokens} new tokens after a prompt of {len(prompt_ids)} exceed the context of "
            f"{model.context_length}; ask for at most {room}, or raise --context-length"
        )
    request = Request(
        request_id=request_id,
        prompt_ids=prompt_ids,
        spec=_spec(fields, wants, seed),
        max_new_tokens=min(default_new_tokens or room, room) if max_new_tokens is None else max_new_tokens,
        stop_ids=_stop_ids(model, fields),
        stop_strings=tuple(stops),
    )
    if wants.top > model.vocab_size:
        raise RequestError(f"top_logprobs_num is {wants.top}; accepted: at most the vocabulary of {model.vocab_size}")
    return request.require(model.vocab_size, model.context_length)


def _stop_ids(model: Model, fields: SamplingFields) -> tuple[int, ...]:
    outside = [i for i in fields.stop_token_ids if not 0 <= i < model.vocab_size]
    if outside:
        raise RequestError(f"stop_token_ids {outside} are outside the vocabulary of {model.vocab_size}")
    if not fields.ignore_eos:
        return tuple(dict.fromkeys([*model.eos_ids, *fields.stop_token_ids]))
    if fields.stop_token_ids:
        raise RequestError("ignore_eos beside stop_token_ids: sglang ignores both then; give one of them")
    return ()


def _spec(fields: SamplingFields, wants: Wants, seed: int | None) -> SamplingSpec:
    if fields.top_k != -1 and fields.top_k < 1:
        raise RequestError(f"top_k is {fields.top_k}; accepted: -1 (off) or at least 1")
    sc = fields.custom_params.sc
    if sc is not None and seed is not None and seed != sc.seed:
        raise RequestError(f"two seeds, {seed} and custom_params.sc.seed {sc.seed}; give one")
    if sc is not None:
        seed = sc.seed
    try:
        plain = SamplingSpec(
            temperature=fields.temperature,
            top_k=max(fields.top_k, 0),
            top_p=fields.top_p,
            filter_order=sc.order if sc else "top_k_first",
            capture="off",
            seed=secrets.randbits(63) if seed is None else seed,
        )
        capture, size = _capture(sc, wants, plain.is_filtered)
        if capture == "head":
            return replace(plain, capture="head", head_size=size)
        return plain if capture == "off" else replace(plain, capture="complete", max_support=size)
    except ValueError as error:
        raise RequestError(str(error)) from error


def _capture(sc: Sc | None, wants: Wants, filtered: bool) -> tuple[Capture, int]:
    """The one capture that serves packed rows and stock fields alike, and its size."""
    capture, size = (sc.capture, sc.k) if sc else ("off", 0)
    if wants.mask:
        if capture == "head":
            raise RequestError(
                "return_sampling_mask beside a captured head: a mask is the whole support; capture 'complete'"
            )
        if capture == "off":
            capture, size = "complete", MASK_CAP
    if wants.logprob:
        if filtered:
            raise RequestError(
                "return_logprob is of the unfiltered law, which is not recorded beside top_k or top_p; "
                "ask return_sampling_mask, or turn the filters off"
            )
        if capture == "off":
            capture, size = "head", max(wants.top, 1)
        elif capture == "head" and wants.top > size:
            raise RequestError(f"top_logprobs_num is {wants.top} beside a head of {size}; ask for one size")
    return capture, size
