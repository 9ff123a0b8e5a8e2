"""The sglang engine's client side, attached over real sockets to servers that speak sglang's dialect."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI, Response

from experiments.validate.gateway import gateway
from miles_ext.errors import CapabilityError, EngineError, RequestError, SupportError
from miles_ext.records import Commit, Status, SupportRows
from miles_ext.sampling import SamplingSpec
from miles_ext.wire import pack
from rollout.config import RolloutConfig
from rollout.engine import Request
from rollout.server.running import running
from rollout.sglang_engine.answers import Served, body, completion
from rollout.sglang_engine.client import Client
from rollout.sglang_engine.engine import SglangEngine
from tests.rollout.served import TINY, request, serving
from tests.rollout.served import Served as Server

CONFIG = RolloutConfig(engine="sglang", request_timeout_s=60, max_concurrency=4)
SERVED = Served(
    engine_id="e", draft_digest="", vocab_size=16, context_length=32, eos_ids=frozenset({9}), seeded=False
)  # fmt: skip


def attach(url: str, config: RolloutConfig = CONFIG) -> SglangEngine:
    return SglangEngine(config, "dflash2", TINY / "target", TINY / "draft", "worker-7", url)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("dflash2") as one:
        yield one


@pytest.fixture(scope="module")
def engine(server: Server) -> Iterator[SglangEngine]:
    one = attach(str(server.client.base_url))
    yield one
    one.close()


def test_responses_come_through_a_router_that_drops_fields(server: Server) -> None:
    url = str(server.client.base_url)
    with gateway([url]) as router:
        sglang = CONFIG.sglang.model_copy(update={"router": router})
        behind = attach(url, CONFIG.model_copy(update={"sglang": sglang}))
        requests = [request(i, top_k=8) for i in range(3)]
        for found, made in zip(behind.generate(requests), server.engine.generate(requests), strict=True):
            np.testing.assert_array_equal(found.response_ids, made.response_ids)
            assert found.support is not None and made.support is not None
            np.testing.assert_array_equal(found.support.logprobs, made.support.logprobs)
        behind.close()
        sent = body(requests[0], replace(SERVED, carried=True, eos_ids=frozenset()))
    assert "custom_params" not in sent["sampling_params"] and "custom_params" in sent["session_params"]


@pytest.mark.parametrize(
    "spec",
    [{}, {"capture": "head", "head_size": 32}, {"top_k": 8, "top_p": 0.9}, {"filter_order": "joint", "top_k": 8}],
    ids=["complete", "head", "filtered", "joint"],
)
def test_completions_are_those_of_the_engine_behind_the_wire(engine: SglangEngine, server: Server, spec: Any) -> None:
    requests = [request(i, stop=("|",) if i == 3 else (), **spec) for i in range(6)]
    for found, made in zip(engine.generate(requests), server.engine.generate(requests), strict=True):
        for name in ("prompt_ids", "response_ids", "commit", "weight_version"):
            np.testing.assert_array_equal(getattr(found, name), getattr(made, name))
        for name in ("token_ids", "offsets", "status"):
            np.testing.assert_array_equal(getattr(found.support, name), getattr(made.support, name))
        for name in ("logprobs", "sampled_logprobs"):  # another batch, another order of summation
            np.testing.assert_allclose(getattr(found.support, name), getattr(made.support, name), atol=1e-4)
        assert (found.text, found.finish_reason, found.spec) == (made.text, made.finish_reason, made.spec)
        assert (found.engine_id, found.draft_digest) == ("worker-7", made.draft_digest)


def test_capability_and_health_are_the_servers_own(engine: SglangEngine, server: Server) -> None:
    (mine,), (own,) = engine.capability(), server.engine.capability()
    assert mine == replace(own, engine_id="worker-7")
    assert engine.healthy()


def test_a_request_is_refused_before_anything_is_sent(engine: SglangEngine) -> None:
    for bad, words in (
        (replace(request(), prompt_ids=np.array([600], np.int32)), "check the tokenizer"),
        (replace(request(), max_new_tokens=0), "max_new_tokens is 0"),
        (replace(request(), stop_ids=(3,)), "stop_ids \\[3\\] leave out \\[15\\]"),
    ):
        with pytest.raises(RequestError, match=words):
            engine.generate([request(), bad])


def test_a_cap_below_the_rows_that_are_asked_for(engine: SglangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_first", replace(engine.capability()[0], max_support=31, filter_orders=("joint",)))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"capture": "head", "head_size": 32}, "rows of up to 32 entries, and rollout.sglang.max_support is 31"),
        ({"max_support": 512}, "rows of up to 512 entries"),
        ({"top_k": 4, "max_support": 8}, "set rollout.sglang.filter_order to the same"),
    ]
    for spec, words in cases:
        with pytest.raises(RequestError, match=words):
            engine.generate([request(**spec)])


def test_the_servers_refusal_is_told_in_its_words(engine: SglangEngine) -> None:
    with pytest.raises(RequestError, match="/generate refuses: stop is \\[''\\]"):
        engine.generate([replace(request(), stop_strings=("",))])


def test_a_server_that_is_gone_is_no_fault_of_the_request() -> None:
    with serving("regular") as one:
        engine = SglangEngine(CONFIG, "regular", TINY / "target", None, "worker-1", str(one.client.base_url))
    assert not engine.healthy()
    with pytest.raises(EngineError, match="/generate does not answer"):
        engine.generate([request()])
    engine.close()


def test_no_more_requests_are_in_flight_than_allowed_and_order_is_kept() -> None:
    import asyncio

    app, now = FastAPI(), [0, 0]

    @app.post("/generate")
    async def generate(one: dict[str, Any]) -> dict[str, Any]:
        now[0] += 1
        now[1] = max(now)
        await asyncio.sleep(0.02 * (one["i"] % 3))
        now[0] -= 1
        return one

    with running(app) as url:
        answers = Client(url, 10, 4).generate([{"i": i} for i in range(20)])
    assert [answer["i"] for answer in answers] == list(range(20))
    assert now[1] == 4


def test_an_answer_that_is_none_is_an_engine_error() -> None:
    app = FastAPI()
    app.post("/generate")(lambda: Response("busy", 503))
    app.get("/server_info")(lambda: Response("<html>", 200))
    app.get("/health")(lambda: Response(status_code=200))
    with running(app) as url:
        client = Client(url, 10, 4)
        with pytest.raises(EngineError, match="answers 503: busy"):
            client.generate([{}])
        with pytest.raises(EngineError, match="answers no JSON"):
            client.get("/server_info")
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # takes connections and never answers
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(EngineError, match="does not answer: ReadTimeout"):
            Client(url, 0.2, 4).generate([{}])


@pytest.mark.parametrize(
    ("state", "words"),
    [({}, "the plugin is not loaded there"), ({"sc": {"ranks": [{"engine": "x"}]}}, "in another form")],
)
def test_a_server_without_proof_is_not_attached_to(state: dict[str, Any], words: str) -> None:
    app = FastAPI()
    app.get("/server_info")(lambda: {"internal_states": [state]})
    with running(app) as url, pytest.raises(CapabilityError, match=words):
        attach(url)


def ask(**spec: Any) -> Request:
    return Request(
        request_id="r", prompt_ids=np.array([1, 2], np.int32), spec=SamplingSpec(**spec), max_new_tokens=50,
        stop_ids=(9,), stop_strings=("x",),
    )  # fmt: skip


def answer(ids: tuple[int, ...] = (4, 5, 9), status: int = 0, **changes: Any) -> dict[str, Any]:
    """What the plugin answers with one-token laws."""
    count = len(ids)
    statuses = np.zeros(count, np.uint8)
    statuses[-1:] = status
    rows = SupportRows(
        token_ids=np.array(ids, np.int32), logprobs=np.zeros(count, np.float32), offsets=np.arange(count + 1),
        sampled_logprobs=np.zeros(count, np.float32), kind="complete", status=statuses,
    )  # fmt: skip
    meta = {
        "id": "r~1", "finish_reason": {"type": "stop", "matched": 9}, "prompt_tokens": 2,
        "completion_tokens": count,
        "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": count}],
        "sc": pack(rows, np.full(count, Commit.PLAIN, np.uint8)),
    } | changes  # fmt: skip
    return json.loads(json.dumps({"output_ids": ids, "text": "t", "meta_info": meta}))


def test_a_body_says_exactly_what_is_asked() -> None:
    asked = body(ask(top_k=4, top_p=0.9, temperature=0.7, seed=5), SERVED)
    assert asked["input_ids"] == [1, 2] and asked["rid"].startswith("r~")
    assert asked["sampling_params"] == {
        "temperature": 0.7, "top_k": 4, "top_p": 0.9, "max_new_tokens": 30, "stop_token_ids": [9], "stop": ["x"],
        "custom_params": {"sc": {"v": 1, "capture": "complete", "k": 4096, "order": "top_k_first", "seed": 5}},
    }  # fmt: skip
    free = body(replace(ask(seed=5), stop_ids=(), stop_strings=()), replace(SERVED, seeded=True))["sampling_params"]
    assert free["ignore_eos"] is True and free["top_k"] == -1 and free["sampling_seed"] == 5
    assert not {"stop", "stop_token_ids"} & set(free)


def test_every_token_has_the_version_of_its_span() -> None:
    found = completion(ask(), answer(), SERVED)
    assert found.weight_version.tolist() == [3, 4, 4]


@pytest.mark.parametrize("status", [Status.OVERFLOW, Status.INVALID])
def test_content_failures_come_back_with_their_rows(status: Status) -> None:
    found = completion(ask(), answer((4, 5), status, finish_reason={"type": "abort", "message": "m"}), SERVED)
    assert (found.finish_reason, found.worst_status, len(found)) == ("abort", status, 2)


BROKEN: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no rows": ({"sc": None}, SupportError, "without the rows that were asked for"),
    "aborted": ({"finish_reason": {"type": "abort", "message": "shutdown"}}, EngineError, "aborted: shutdown"),
    "unknown end": ({"finish_reason": {"type": "tired"}}, EngineError, "accepted: stop, length, abort"),
    "unasked stop": ({"finish_reason": {"type": "stop", "matched": 7}}, EngineError, "stopped at 7, which was not"),
    "lost tokens": ({"completion_tokens": 7}, EngineError, "7 response tokens counted"),
    "other request": ({"id": "s~1"}, EngineError, "the answer is to 's~1'"),
    "no name": ({"id": None}, EngineError, "the answer is to None"),
    "other form": ({"prompt_tokens": 2, "finish_reason": "stop"}, EngineError, "came back in another form"),
    "other prompt": ({"prompt_tokens": 1}, EngineError, "1 prompt and"),
    "no versions": ({"weight_versions": []}, EngineError, "do not cover its 3 tokens"),
    "named version": (
        {"weight_versions": [{"version": "default", "start": 0, "end": 3}]}, EngineError, "do not cover its 3 tokens"
    ),
    "gap": ({"weight_versions": [{"version": "1", "start": 1, "end": 3}]}, EngineError, "do not cover"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_not_add_up_is_loud(name: str) -> None:
    changes, error, words = BROKEN[name]
    broken = answer(**changes)
    if changes.get("sc", 1) is None:
        del broken["meta_info"]["sc"]
    with pytest.raises(error, match=words):
        completion(ask(), broken, SERVED)


def test_rows_are_checked_where_they_are_decoded() -> None:
    short = answer((4, 5, 9))
    short["output_ids"] = [4, 5, 8, 9]
    short["meta_info"] |= {"completion_tokens": 4, "weight_versions": [{"version": "3", "start": 0, "end": 4}]}
    with pytest.raises(SupportError):
        completion(ask(), short, SERVED)
    moved = answer((4, 5, 9))
    moved["output_ids"] = [4, 6, 9]
    with pytest.raises(SupportError, match="support row 1: the committed token is not in its support"):
        completion(ask(), moved, SERVED)
    with pytest.raises(SupportError, match="asked for: 'head'"):
        completion(ask(capture="head", head_size=4), answer(), SERVED)
