"""From requests to bodies of `/generate`, and from its answers to completions."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_ext.errors import EngineError, RequestError, SupportError
from miles_ext.records import Commit, Completion, FinishReason, SpecCounters, Status, SupportRows
from miles_ext.wire import request_fields, unpack
from rollout.engine import Request


@dataclass(frozen=True, slots=True)
class Served:
    """What every answer of one server shares. eos_ids: tokens at which it ends a response unless told not to.
    carried: a router stands before it, which forwards `session_params` and no `custom_params`."""

    engine_id: str
    draft_digest: str
    vocab_size: int
    context_length: int
    eos_ids: frozenset[int]
    seeded: bool
    carried: bool = False


def body(request: Request, served: Served) -> dict[str, Any]:
    """The body of `/generate`. Raises RequestError where sglang could not honour the stop tokens exactly."""
    spec = request.spec
    unnamed = sorted(served.eos_ids - set(request.stop_ids))
    if request.stop_ids and unnamed:
        raise RequestError(
            f"request {request.request_id}: stop_ids {list(request.stop_ids)} leave out {unnamed}, at which sglang "
            "ends a response anyway; name them too, or give no stop_ids at all"
        )
    room = served.context_length - len(request.prompt_ids)
    params: dict[str, Any] = {
        "temperature": spec.temperature,
        "top_k": spec.top_k or -1,
        "top_p": spec.top_p,
        "max_new_tokens": min(request.max_new_tokens, room),
    }
    extension = {"custom_params": {"sc": request_fields(spec)}}
    if not served.carried:
        params |= extension
    if request.stop_ids:
        params["stop_token_ids"] = list(request.stop_ids)
    else:
        params["ignore_eos"] = True
    if request.stop_strings:
        params["stop"] = list(request.stop_strings)
    if served.seeded:
        params["sampling_seed"] = spec.seed
    name = f"{request.request_id}~{uuid.uuid4().hex[:12]}"  # an abandoned twin may still be decoding
    placed = {"session_params": extension} if served.carried else {}
    return {"input_ids": request.prompt_ids.tolist(), "sampling_params": params, "rid": name, **placed}


def completion(request: Request, answer: Any, served: Served) -> Completion:
    """The answer to `body(request)`, checked; EngineError for one of another form."""
    try:
        return _completion(request, answer, served)
    except (EngineError, RequestError, SupportError):
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise EngineError(
            f"request {request.request_id} on {served.engine_id} came back in another form "
            f"({type(error).__name__}: {error}); accepted: what sglang 0.5.23 answers"
        ) from error


def _completion(request: Request, answer: Mapping[str, Any], served: Served) -> Completion:
    """The completion.

    OVERFLOW and INVALID rows come back in the support's status. Raises EngineError where the server gave up for another
    reason or left out rows that were asked for, SupportError where rows do not add up.
    """
    meta, ids = answer["meta_info"], np.array(answer["output_ids"], np.int32)
    where = f"request {request.request_id} on {served.engine_id}"
    if not str(meta.get("id", "")).startswith(f"{request.request_id}~"):
        raise EngineError(f"{where}: the answer is to {meta.get('id')!r}; accepted: the id that was sent")
    reason = _reason(meta["finish_reason"], ids, request, where)
    rows, commit = _rows(meta, ids, request, where)
    found = Completion(
        prompt_ids=request.prompt_ids,
        response_ids=ids,
        support=rows,
        commit=commit,
        weight_version=_versions(meta, len(ids), where),
        finish_reason=reason,
        text=answer.get("text", ""),
        spec=_counters(meta, commit, captured=rows is not None),
        request_id=request.request_id,
        engine_id=served.engine_id,
        draft_digest=served.draft_digest,
    )
    if meta["completion_tokens"] != len(ids) or meta["prompt_tokens"] != len(request.prompt_ids):
        raise EngineError(
            f"{where}: {meta['prompt_tokens']} prompt and {meta['completion_tokens']} response tokens counted, "
            f"{len(request.prompt_ids)} sent and {len(ids)} received"
        )
    if reason == "abort" and found.worst_status is Status.OK:
        raise EngineError(f"{where} was aborted: {meta['finish_reason'].get('message', 'no reason given')}")
    return found.check(served.vocab_size)


def _reason(finish: Mapping[str, Any], ids: NDArray[np.int32], request: Request, where: str) -> FinishReason:
    kind = finish["type"]
    if kind not in ("stop", "length", "abort"):
        raise EngineError(f"{where} finished with {dict(finish)}; accepted: stop, length, abort")
    matched = finish.get("matched")
    asked = matched in request.stop_strings or (len(ids) and int(ids[-1]) == matched and matched in request.stop_ids)
    if kind == "stop" and not asked:
        raise EngineError(f"{where} stopped at {matched!r}, which was not asked for; name it in stop_ids")
    return kind


def _rows(
    meta: Mapping[str, Any], ids: NDArray[np.int32], request: Request, where: str
) -> tuple[SupportRows | None, NDArray[np.uint8]]:
    """Rows and commit kinds. Without capture sglang tells no kinds: tokens after the first are marked PLAIN."""
    if request.spec.capture == "off":
        commit = np.full(len(ids), Commit.PLAIN, np.uint8)
        commit[:1] = Commit.PREFILL
        return None, commit
    if "sc" not in meta:
        raise SupportError(f"{where} came back without the rows that were asked for; is the plugin loaded there?")
    rows, commit = unpack(meta["sc"])
    if rows.kind != request.spec.capture:
        raise SupportError(f"{where} came back with rows of kind {rows.kind!r}; asked for: {request.spec.capture!r}")
    return rows, commit


def _versions(meta: Mapping[str, Any], count: int, where: str) -> NDArray[np.int64]:
    """The weight version of each token, from sglang's spans."""
    spans = meta.get("weight_versions") or []
    versions, at = np.empty(count, np.int64), 0
    for span in spans:
        if span["start"] != at or not span["version"].isdecimal():
            break
        versions[at : span["end"]] = int(span["version"])
        at = span["end"]
    if at != count:
        raise EngineError(f"{where}: weight versions {spans} do not cover its {count} tokens in numbers")
    return versions


def _counters(meta: Mapping[str, Any], commit: NDArray[np.uint8], *, captured: bool) -> SpecCounters:
    """sglang counts verify steps only: regular decoding takes one step a token after the prefill."""
    drafts = int((commit == Commit.DRAFT).sum()) if captured else meta.get("spec_num_correct_drafts") or 0
    return SpecCounters(
        live_steps=meta.get("spec_verify_ct") or int((commit == Commit.PLAIN).sum()),
        proposed=meta.get("spec_num_proposed_drafts") or 0,
        accepted=drafts,
    )
