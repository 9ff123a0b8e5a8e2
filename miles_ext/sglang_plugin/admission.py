"""Refuses at admission, with 400, what would not be drawn from the law or could not be recorded whole."""

from __future__ import annotations

from typing import Any

from miles_ext.sglang_plugin import guard
from miles_ext.sglang_plugin.plan import CAPTURES, OFF, REQUEST_KEY
from miles_ext.sglang_plugin.settings import read_settings
from miles_ext.sglang_plugin.worker import WorkerFacts, inspect_worker
from miles_ext.wire import WIRE_VERSION

TOP_K_OFF = 1 << 30  # sglang's spelling of "no top-k"


def after_create_request(request: Any, scheduler: Any, received: Any, *_args: Any, **_rest: Any) -> None:
    message = refusal(request, inspect_worker(scheduler))
    if message:
        # sglang prefills one token of a refused request all the same: nothing may be recorded of it, least of all with
        # numbers that were just refused.
        request.sampling_params.custom_params = None
        request.set_finish_with_abort(message)


def refusal(request: Any, facts: WorkerFacts) -> str:
    """Why this request cannot be honoured by the loaded worker; empty where it can."""
    params = request.sampling_params
    asked = (params.custom_params or {}).get(REQUEST_KEY)
    message = capture_refusal(asked, request, facts) if asked is not None else ""
    captures = not message and asked is not None and CAPTURES[asked["capture"]] != OFF
    if not message and params.top_k != 1 and (captures or read_settings().strict):
        message = law_refusal(params, facts)
    return message


def law_refusal(params: Any, facts: WorkerFacts) -> str:
    """A sampled request on this worker: the law must be the verifier's, unloosened, and know every filter."""
    if params.min_p > 0:
        return f"min_p is {params.min_p}; the law knows temperature, top_k and top_p only; accepted: 0"
    if facts.blockers:
        return f"this server runs with {', '.join(facts.blockers)}, which breaks the sampling law; restart without"
    if not facts.sampling_verify_available:
        return (
            "sampled requests would be verified greedily on this server: no sampling verifier is loaded; "
            "use temperature 0, another device, or start the server with MILES_SC_STRICT=0"
        )
    return ""


def capture_refusal(asked: Any, request: Any, facts: WorkerFacts) -> str:
    """The fields of `custom_params.sc` against the request's filters and the server's limits."""
    params = request.sampling_params
    if not isinstance(asked, dict) or asked.get("v") != WIRE_VERSION:
        return f"custom_params.sc is {asked!r}; accepted: an object with v = {WIRE_VERSION}"
    if asked.get("capture") not in CAPTURES:
        return f"capture is {asked.get('capture')!r}; accepted: {', '.join(CAPTURES)}"
    if asked.get("order") != facts.filter_order:
        return (
            f"filter order is {asked.get('order')!r}; this server samples with {facts.filter_order!r}; "
            "start it with MILES_SC_FILTER_ORDER set to the other"
        )
    if asked["capture"] == "off":
        return ""
    filtered = params.top_k < facts.vocab_size or params.top_p < 1
    missing = guard.missing()
    if missing:
        return f"capture needs patches that are not in force: {'; '.join(missing)}"
    if request.stream:
        return "capture beside stream=true; rows come with the whole response, set stream to false"
    k = asked.get("k")
    if not isinstance(k, int) or k < 1:
        return f"k is {k!r}; accepted: an integer >= 1"
    if asked["capture"] == "head":
        if filtered:
            return f"a head of the unfiltered law beside top_k={params.top_k}, top_p={params.top_p}; capture 'complete'"
        return f"head size {k} exceeds the vocabulary of {facts.vocab_size}" if k > facts.vocab_size else ""
    if k > facts.max_support:
        return f"k is {k}; this server's --sampling-mask-max-tokens is {facts.max_support}: lower k or raise the flag"
    if not filtered and facts.vocab_size > k:
        return f"complete capture of an unfiltered law needs k >= {facts.vocab_size} (the vocabulary), got {k}"
    return ""
