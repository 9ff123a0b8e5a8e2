"""Row `refusals`: whatever would break the law is refused with a clear reason, and nothing is lost by it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import httpx
import numpy as np

from experiments.evidence import Row, all_of
from experiments.validate.settings import Context
from miles_ext.capability import ArmKind, EngineCapability, require
from miles_ext.errors import CapabilityError, RequestError, SupportError
from miles_ext.records import Completion, Status, SupportRows
from miles_ext.sampling import SamplingSpec
from miles_ext.wire import request_fields
from rollout.engine import Engine, Request
from rollout.sglang_engine.engine import SglangEngine

FILTERED = SamplingSpec(top_k=32, top_p=0.95)
UNKNOWN: dict[str, Any] = {"min_p": 0.1}  # accepted by others, honoured nowhere here
PROMPT = np.array([3, 141, 59, 26], np.int32)

# What an engine might say of itself, and the words of the refusal.
INADEQUATE: dict[str, tuple[dict[str, Any], str]] = {
    "greedy fallback": ({"dflash_sampling_verify_available": False}, "greedy fallback"),
    "threshold below 1": ({"accept_threshold_single": 0.9}, "accept_threshold_single is 0.9"),
    "accumulated threshold below 1": ({"accept_threshold_acc": 0.5}, "accept_threshold_acc is 0.5"),
    "simulated acceptance": ({"environment": ("SIMULATE_ACC_LEN=3",)}, "SIMULATE_ACC_LEN"),
    "other filter order": ({"filter_orders": ("joint",)}, "'top_k_first' is not among"),
    "missing plugin": ({"patches": frozenset()}, "patches not in force"),
    "test verifier": ({"verifier_impl": "test"}, "verifier implementation is 'test'"),
    "unproved draft": ({"draft_digest": ""}, "no digest of the private draft"),
    "another arm": ({"arm": "regular", "verifier": "none"}, "loaded arm is 'regular'"),
}


def rows(context: Context) -> list[Row]:
    found = []
    for arm in context.engines.arms:
        engine = context.engines.open(arm, context_length=24)
        before = answer(context, engine)
        tried = {**sampling_refusals(), **request_refusals(engine)}
        if arm != "regular":
            (capability, *_) = engine.capability()
            tried |= capability_refusals(capability, arm, context.engines.allow_test_verifier)
        if context.engines.name == "sglang":
            tried |= server_refusals(engine)
        wrong = [f"{name}: {outcome}" for name, act in tried.items() if (outcome := act()) != "refused"]
        after = answer(context, engine)
        kept = np.array_equal(before.response_ids, after.response_ids)
        found += [
            all_of(f"refusals/{arm}", len(tried) - len(wrong), len(tried), "; ".join(wrong) or ", ".join(tried)),
            Row(f"refusals/{arm}_nothing_lost", float(kept), "", "same answer before and after", kept),
            overflow(context, engine, arm),
        ]
        engine.close()
    return found


def answer(context: Context, engine: Engine) -> Completion:
    request = Request(request_id="x", prompt_ids=PROMPT, spec=FILTERED, max_new_tokens=8)
    return context.engines.replay(engine, [request])[0]


def refused(act: Callable[[], object], error: type[Exception], words: str) -> Callable[[], str]:
    """Runs `act`: 'refused' where it raises `error` with these words, else what happened instead."""

    def run() -> str:
        try:
            act()
        except error as raised:
            return "refused" if re.search(words, str(raised)) else f"without the reason: {raised}"
        return "not refused"

    return run


def sampling_refusals() -> dict[str, Callable[[], str]]:
    return {
        "greedy with capture": refused(lambda: SamplingSpec(temperature=0), ValueError, "no law to capture"),
        "head of a filtered law": refused(lambda: SamplingSpec(capture="head", top_k=5), ValueError, "unfiltered law"),
        "min_p": refused(lambda: SamplingSpec(**UNKNOWN), TypeError, "min_p"),
        "top_p above 1": refused(lambda: SamplingSpec(top_p=1.5), ValueError, "top_p is 1.5"),
        "truncated support": refused(check_truncated, SupportError, "mass is not 1"),
    }


def check_truncated() -> None:
    """A complete row that lost its last entry and still says OK."""
    logprobs = np.log(np.array([0.6, 0.3], np.float32))
    SupportRows(
        token_ids=np.array([4, 7], np.int32), logprobs=logprobs, offsets=np.array([0, 2]), kind="complete",
        sampled_logprobs=logprobs[:1], status=np.zeros(1, np.uint8),
    ).check(np.array([4]), 10)  # fmt: skip


def request_refusals(engine: Engine) -> dict[str, Callable[[], str]]:
    def ask(**changes: Any) -> Callable[[], object]:
        request = Request(request_id="x", prompt_ids=PROMPT, spec=FILTERED, max_new_tokens=8)
        return lambda: engine.generate([replace(request, **changes)])

    whole = SamplingSpec(max_support=100)
    return {
        "empty prompt": refused(ask(prompt_ids=PROMPT[:0]), RequestError, "prompt is empty"),
        "prompt beyond the context": refused(ask(prompt_ids=np.tile(PROMPT, 9)), RequestError, "no room"),
        "unknown token": refused(ask(prompt_ids=PROMPT + 10**6), RequestError, "outside"),
        "whole law above max_support": refused(ask(spec=whole), RequestError, "max_support"),
    }


def server_refusals(engine: Engine) -> dict[str, Callable[[], str]]:
    """What the server itself answers with 400 where no client of ours stands before it."""
    url = cast(SglangEngine, engine).url

    def ask(**params: Any) -> Callable[[], str]:
        body = {"input_ids": PROMPT.tolist(), "sampling_params": {"max_new_tokens": 4, "top_k": 4, **params}}

        def run() -> str:
            answer = httpx.post(f"{url}/generate", json=body, timeout=60)
            return "refused" if answer.status_code == 400 else f"HTTP {answer.status_code}: {answer.text[:100]}"

        return run

    def loosened() -> str:
        body = {"server_args": {"speculative_accept_threshold_acc": 0.9}}
        httpx.post(f"{url}/set_internal_state", json=body, timeout=60)
        held = all(rank.accept_threshold_acc == 1.0 for rank in engine.capability())
        return "refused" if held else "the threshold was loosened"

    def packed(**fields: Any) -> dict[str, Any]:
        return {"custom_params": {"sc": {**request_fields(FILTERED), **fields}}}

    return {
        "HTTP min_p": ask(min_p=0.1),
        "HTTP other order": ask(**packed(order="joint")),
        "HTTP support above the mask cap": ask(**packed(k=10**6)),
        "HTTP head of a filtered law": ask(**packed(capture="head")),
        "HTTP threshold": loosened,
    }


def capability_refusals(
    capability: EngineCapability, arm: ArmKind, test_verifier: bool
) -> dict[str, Callable[[], str]]:
    """Every inadequate report is refused before a rollout; the engine's own, unchanged, is not."""

    def proved() -> str:
        require(capability, FILTERED, arm, allow_test_verifier=test_verifier)
        return "refused"  # stands for: as it should be

    checks = {
        name: refused(partial(require, replace(capability, **changes), FILTERED, arm), CapabilityError, words)
        for name, (changes, words) in INADEQUATE.items()
    }
    return {"(its own report is accepted)": proved, **checks}


def overflow(context: Context, engine: Engine, arm: ArmKind) -> Row:
    """A support above its cap ends that response as OVERFLOW with an empty row; its neighbours are untouched."""
    alone = answer(context, engine)
    small = replace(FILTERED, max_support=4, seed=9)
    requests = [
        Request(request_id="small", prompt_ids=PROMPT, spec=small, max_new_tokens=8),
        Request(request_id="x", prompt_ids=PROMPT, spec=FILTERED, max_new_tokens=8),
    ]
    cut, beside = engine.generate(requests)
    assert cut.support is not None
    status = int(cut.support.status[-1])
    over = cut.support.status == Status.OVERFLOW
    # A server's draws do not repeat beside others: there the neighbour must be whole.
    same = np.array_equal(beside.response_ids, alone.response_ids)
    whole = len(beside) == len(alone) and beside.worst_status is Status.OK
    good = (
        cut.finish_reason == "abort"
        and status == Status.OVERFLOW
        and not cut.support.lengths[over].any()
        and (context.engines.name == "sglang" or over.sum() == 1)
        and (whole if context.engines.name == "sglang" else same)
    )
    detail = f"cap 4: {cut.finish_reason} at token {len(cut)}, row status {Status(status).name}; neighbour unchanged"
    return Row(f"refusals/{arm}_overflow", status, "status", "OVERFLOW, never cut short", good, detail)
