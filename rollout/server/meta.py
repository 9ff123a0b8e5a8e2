"""From a completion to sglang's `meta_info`: counters, finish reason, stock lists, and the packed rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from miles_ext.records import Completion, Status, SupportRows
from miles_ext.wire import pack
from rollout.engine import Request
from rollout.server.model import Model
from rollout.server.params import Wants


class ContentError(RuntimeError):
    """A response whose law could not be recorded. Nothing is cut short or drawn again, since that would change q."""

    def __init__(self, status_code: int, message: str) -> None:
        super().__init__(message)
        self.status_code = status_code


def require_recorded(request: Request, completion: Completion) -> None:
    """Raise ContentError for a response that ended in OVERFLOW (400) or INVALID (500)."""
    if completion.finish_reason != "abort":
        return
    at = f"request {request.request_id}: response token {len(completion) - 1}"
    if completion.worst_status == Status.OVERFLOW:
        raise ContentError(
            400,
            f"{at}: its support holds more than k = {request.spec.max_support} tokens; nothing was cut short or drawn "
            "again: raise k, or narrow top_k or top_p",
        )
    raise ContentError(500, f"{at}: its law is not finite; check the weights of this server")


def finish(model: Model, request: Request, completion: Completion) -> tuple[dict[str, Any], str]:
    """(finish reason, text). Ids are whole; the text ends before the stop."""
    if completion.finish_reason != "stop":
        return {"type": "length", "length": len(completion)}, completion.text
    whole = model.decode(completion.response_ids)
    found = [(whole.find(stop), stop) for stop in request.stop_strings if stop in whole]
    if found:
        return {"type": "stop", "matched": min(found)[1]}, completion.text
    return {"type": "stop", "matched": int(completion.response_ids[-1])}, model.decode(completion.response_ids[:-1])


def meta_info(
    model: Model, request: Request, completion: Completion, wants: Wants, reason: dict[str, Any], latency_s: float
) -> dict[str, Any]:
    tokens, spec = len(completion), completion.spec
    spans = _version_spans(completion)
    meta: dict[str, Any] = {
        "id": request.request_id,
        "finish_reason": reason,
        "prompt_tokens": len(completion.prompt_ids),
        "completion_tokens": tokens,
        "cached_tokens": 0,
        "num_retractions": 0,
        "weight_version": spans[-1]["version"],
        "weight_versions": spans,
        "e2e_latency": latency_s,
        "engine_id": completion.engine_id,
    }
    if spec.proposed:
        meta |= {
            "spec_accept_rate": spec.accepted / spec.proposed,
            "spec_accept_length": tokens / spec.live_steps,
            "spec_num_correct_drafts": spec.accepted,
            "spec_num_proposed_drafts": spec.proposed,
            "spec_verify_ct": spec.live_steps,
        }
    rows = completion.support
    if rows is not None:
        meta["sc"] = pack(rows, completion.commit)
        if wants.mask:
            meta |= _mask_lists(rows, wants)
        if wants.logprob:
            meta |= _logprob_lists(model, completion, rows, wants)
    return meta


def _version_spans(completion: Completion) -> list[dict[str, Any]]:
    """Runs of response tokens drawn from one version of the weights."""
    versions = completion.weight_version
    starts = np.flatnonzero(np.diff(versions, prepend=versions[0] - 1)).tolist()
    ends = [*starts[1:], len(versions)]
    return [{"version": str(versions[i]), "start": i, "end": end} for i, end in zip(starts, ends, strict=True)]


def _by_probability(rows: SupportRows) -> tuple[np.ndarray, np.ndarray]:
    """Ids and logprobs of all rows, likeliest first within each."""
    owner = np.repeat(np.arange(len(rows)), rows.lengths)
    order = np.lexsort((-rows.logprobs, owner))
    return rows.token_ids[order], rows.logprobs[order]


def _mask_lists(rows: SupportRows, wants: Wants) -> dict[str, Any]:
    ids, logprobs = _by_probability(rows)
    support = wants.mask_logprobs == "support"
    return {
        "output_token_sampling_mask": _split(ids, rows),
        "output_token_sampling_logprobs": _split(logprobs, rows) if support else rows.sampled_logprobs.tolist(),
        "output_token_sampling_mask_length": len(rows),
    }


def _logprob_lists(model: Model, completion: Completion, rows: SupportRows, wants: Wants) -> dict[str, Any]:
    def triples(logprobs: list[float], ids: list[int]) -> list[list[Any]]:
        texts = [model.token_text(i) for i in ids] if wants.text else [None] * len(ids)
        return [list(triple) for triple in zip(logprobs, ids, texts, strict=True)]

    lists: dict[str, Any] = {
        "input_token_logprobs": [],
        "output_token_logprobs": triples(rows.sampled_logprobs.tolist(), completion.response_ids.tolist()),
        "output_token_logprobs_length": len(rows),
    }
    if wants.top:
        ids, logprobs = (_split(flat, rows) for flat in _by_probability(rows))
        lists["input_top_logprobs"] = []
        lists["output_top_logprobs"] = [
            triples(p[: wants.top], i[: wants.top]) for p, i in zip(logprobs, ids, strict=True)
        ]
    return lists


def _split(flat: np.ndarray, rows: SupportRows) -> list[list[Any]]:
    values, ends = flat.tolist(), rows.offsets.tolist()
    return [values[first:last] for first, last in zip(ends[:-1], ends[1:], strict=True)]
