"""Single-turn generation that records the law of every token: Miles' own, and the rows beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput
from miles.rollout.generate_hub import single_turn
from miles.rollout.generate_utils import generate_endpoint_utils as endpoint
from miles.utils.http_utils import post
from miles.utils.types import Sample

from miles_ext.errors import CapabilityError, SupportError
from miles_ext.miles_adapter import samples
from miles_ext.miles_adapter.arguments import add_arguments, spec_of
from miles_ext.miles_adapter.samples import SampleRows
from miles_ext.miles_adapter.versions import version
from miles_ext.records import SupportKind, SupportRows
from miles_ext.sampling import SamplingSpec
from miles_ext.wire import request_fields, unpack

# Parameters of a request that leave the law of its tokens alone. Any other is refused.
NEUTRAL = {
    "temperature", "top_k", "top_p", "max_new_tokens", "stop", "stop_token_ids", "stop_regex", "ignore_eos",
    "skip_special_tokens", "no_stop_trim", "spaces_between_special_tokens", "sampling_seed", "custom_params",
}  # fmt: skip


async def generate(input: GenerateFnInput) -> GenerateFnOutput:
    """--custom-generate-function-path. Evaluation samples as Miles does and records nothing.

    An exception alone does not end a rollout: Miles logs it and samples another group. That is right for an engine that
    died, which depends on no content; everything else is told to `rollout.RolloutFn`, which stops.
    """
    if input.evaluation:
        return await single_turn.generate(input)
    try:
        return await _generate(input)
    except httpx.HTTPError as error:
        if isinstance(error, httpx.HTTPStatusError) and error.response.is_client_error:
            answer = error.response
            _stop(input, CapabilityError(f"{answer.url} answers {answer.status_code}: {answer.text[:500]}"))
        raise
    except Exception as error:
        _stop(input, error)
        raise


generate.add_arguments = add_arguments


async def _generate(input: GenerateFnInput) -> GenerateFnOutput:
    args, sample, params = input.args, input.sample, input.sampling_params
    spec = spec_of(args)
    require_law(params, spec)
    vocab_size = proved_vocabulary(input.state)
    prompt_ids = list(endpoint.compute_prompt_ids_from_sample(input.state, sample))
    input_ids = prompt_ids
    if sample.response_length > 0:  # a partial rollout goes on
        input_ids = sample.tokens
        params["max_new_tokens"] -= sample.response_length
        if params["max_new_tokens"] <= 0:
            sample.status = Sample.Status.TRUNCATED
            return GenerateFnOutput(samples=sample)
    payload, halted = endpoint.compute_request_payload(
        args, input_ids=input_ids, sampling_params=params, multimodal_inputs=sample.multimodal_inputs
    )
    if payload is None:  # no room for a token
        sample.status = halted
        nothing = SampleRows(rows=SupportRows.empty(_kind(spec)), spec=spec, vocab_size=vocab_size)
        samples.append(sample, nothing)
        return GenerateFnOutput(samples=sample)

    payload["return_logprob"] = False  # the rows hold the logprobs, of the law after its filters
    payload["sampling_params"]["custom_params"] = {"sc": request_fields(spec)}
    headers = endpoint.compute_routing_headers(args, sample) if version("rollout").routing_headers else None
    answer = await post(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate", payload, headers=headers)
    rows = read_rows(answer, spec, vocab_size)
    answer["meta_info"]["output_token_logprobs"] = [
        [logprob, token] for logprob, token in zip(rows.sampled_logprobs.tolist(), answer["output_ids"], strict=True)
    ]
    await endpoint.update_sample_from_response(
        args, sample, payload=payload, output=answer, update_loss_mask=sample.loss_mask is not None
    )
    samples.append(sample, SampleRows(rows=rows, spec=spec, vocab_size=vocab_size))
    return GenerateFnOutput(samples=sample)


def read_rows(answer: Any, spec: SamplingSpec, vocab_size: int) -> SupportRows:
    """The rows of an answer of `/generate`, checked against its tokens. Raises SupportError."""
    meta, ids = _parts(answer)
    reason = meta.get("finish_reason") or {}
    if "sc" not in meta:
        if not ids and reason.get("type") == "abort":
            return SupportRows.empty(_kind(spec))  # aborted while it waited
        raise SupportError(
            f"a response of {len(ids)} tokens came back without the rows that were asked for: the router or the engine "
            "dropped custom_params.sc or meta_info.sc; use --use-miles-router, and load the plugin in every engine"
        )
    if not isinstance(meta["sc"], dict):
        raise SupportError(f"meta_info.sc is {str(meta['sc'])[:80]!r}; accepted: an object, as the plugin sends it")
    rows, _ = unpack(meta["sc"])
    found = SampleRows(rows=rows, spec=spec, vocab_size=vocab_size)
    found.require(ids, spec, f"a response that finished with {reason or 'no reason'}")
    return rows


def _parts(answer: Any) -> tuple[Mapping[str, Any], list[int]]:
    meta = answer.get("meta_info") if isinstance(answer, Mapping) else None
    ids = answer.get("output_ids") if isinstance(answer, Mapping) else None
    if not isinstance(meta, Mapping) or not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise SupportError(
            f"an answer without meta_info and output_ids: {str(answer)[:200]}; the address of the router must lead to "
            "sglang's /generate"
        )
    return meta, ids


def require_law(params: Mapping[str, Any], spec: SamplingSpec) -> None:
    """Raise SupportError where a request would be drawn from another law than the trainer assumes."""
    top_k = params.get("top_k", -1)
    asked = (params.get("temperature", 1.0), max(top_k, 0), params.get("top_p", 1.0))
    if asked != (spec.temperature, spec.top_k, spec.top_p):
        raise SupportError(
            f"a request has (temperature, top_k, top_p) {asked}, the trainer expects "
            f"{(spec.temperature, spec.top_k, spec.top_p)}; change --rollout-temperature, --rollout-top-k or "
            "--rollout-top-p instead, which hold for both"
        )
    if params.get("custom_params"):
        raise SupportError(f"custom_params {params['custom_params']} beside capture; accepted: none")
    foreign = sorted(name for name in params.keys() - NEUTRAL if params[name] is not None)
    if foreign:
        raise SupportError(f"sampling parameters {foreign} may change the law unseen by its rows; accepted: none")


def proved_vocabulary(state: Any) -> int:
    watch = getattr(state, "sc_watch", None)
    if watch is None or watch.proof is None:
        raise CapabilityError(
            "no engine was asked for its capability; set --rollout-function-path to "
            "miles_ext.miles_adapter.rollout.RolloutFn"
        )
    return watch.proof.vocab_size


def _kind(spec: SamplingSpec) -> SupportKind:
    return "head" if spec.capture == "head" else "complete"


def _stop(input: GenerateFnInput, error: Exception) -> None:
    watch = getattr(input.state, "sc_watch", None)
    if watch is not None:
        watch.fail(error)
