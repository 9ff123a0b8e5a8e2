"""Row `collection`: support rows as a client collects them over HTTP, directly and through the real sglang-router.

24 cases: 2 routes, native and chat requests, 3 captures, 2 ways to end. Each reply must decode, obey the contract, and
be to the last bit what the engine itself gave for the same request before it was put behind HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from typing import Any

import httpx
import numpy as np

from experiments.evidence import Row, all_of
from experiments.tasks import addition
from experiments.validate.gateway import gateway
from experiments.validate.settings import Context
from miles_ext.capability import ArmKind
from miles_ext.errors import SupportError
from miles_ext.records import Completion, Status, SupportRows
from miles_ext.sampling import SamplingSpec
from miles_ext.wire import request_fields, unpack
from rollout.engine import Request
from rollout.server.model import Model

PROMPT = "123+456="
STOP = ";|"  # ends in another token than it starts in
MAX_NEW_TOKENS = 64
ROUTES, DIALECTS, ENDS = ("direct", "router"), ("native", "chat"), ("eos", "stop")
CAPTURES: dict[str, dict[str, Any]] = {
    "head32": {"capture": "head", "head_size": 32},
    "head128": {"capture": "head", "head_size": 128},
    "filtered": {"capture": "complete", "top_k": 32, "top_p": 0.95},
}


@dataclass(frozen=True)
class Case:
    route: str
    dialect: str
    capture: str
    end: str

    @property
    def name(self) -> str:
        return f"{self.route}/{self.dialect}/{self.capture}/{self.end}"

    @property
    def request(self) -> Request:
        """The same, seed included, on both routes and in both dialects."""
        seed = 1 + list(product(CAPTURES, ENDS)).index((self.capture, self.end))
        return Request(
            request_id=self.name,
            prompt_ids=np.array(addition.encode(PROMPT), np.int32),
            spec=SamplingSpec(seed=seed, **CAPTURES[self.capture]),
            max_new_tokens=MAX_NEW_TOKENS,
            stop_ids=(addition.EOS_ID,),
            stop_strings=(STOP,) if self.end == "stop" else (),
        )


@dataclass(frozen=True)
class Reply:
    """What both dialects say, under one set of names."""

    prompt_ids: list[int]
    ids: list[int]
    text: str
    finish: str
    matched: int | str | None
    rows: SupportRows
    commit: np.ndarray


def cases() -> Iterator[Case]:
    return (Case(*one) for one in product(ROUTES, DIALECTS, CAPTURES, ENDS))


def rows(context: Context) -> list[Row]:
    """The row and its controls: of DFlash2 when quick, of every arm otherwise."""
    arms: tuple[ArmKind, ...] = ("dflash2",) if context.quick else context.engines.arms
    return [row for arm in arms for row in _arm_rows(context, arm)]


def _arm_rows(context: Context, arm: ArmKind) -> list[Row]:
    engines = context.engines
    engine = engines.open(arm, "trained", max_concurrency=4)
    model = Model(engines.target("trained"), name="tiny", vocab_size=engines.vocab_size, context_length=128)
    own = {wanted: engines.replay(engine, [Case("", "", *wanted).request])[0] for wanted in product(CAPTURES, ENDS)}
    expected = {case: own[case.capture, case.end] for case in cases()}
    failures, replies = [], {}
    with ExitStack() as stack:
        server = stack.enter_context(engines.serve(engine, "trained"))
        bases = {"direct": server, "router": stack.enter_context(gateway([server]))}
        clients = {r: stack.enter_context(httpx.Client(base_url=url, timeout=60)) for r, url in bases.items()}
        for case in cases():
            engines.reset(engine, case.request.spec.seed)
            try:
                replies[case] = ask(clients[case.route], case)
                require(case, replies[case], expected[case], model)
            except (SupportError, httpx.HTTPError) as error:
                failures.append(f"{case.name}: {error}")
        # sglang passes over the names of its own mask on this route.
        kinds = (0, 1) if engines.name == "embedded" else (1,)
        behind = adapter(context, arm, bases["router"], own) if engines.name == "sglang" else []
        completions = sum(_completion_is_refused(client, packed) for client in clients.values() for packed in kinds)
        plain = [Case("router", dialect, "head32", "eos") for dialect in DIALECTS]
        lost = sum(_refuses(lambda case=case: ask(clients["router"], case, carry=False)) for case in plain)
    total = len(expected)
    moved = {case: shift(reply) for case, reply in replies.items()}
    by_contract = sum(
        _refuses(lambda reply=reply: reply.rows.check(np.array(reply.ids), model.vocab_size))
        for reply in moved.values()
    )
    count = sum(len(reply.rows) for reply in replies.values())
    name, routes = f"collection/{arm}", 2 * len(kinds)
    return [
        all_of(name, total - len(failures), total, "; ".join(failures) or f"{count} rows, each equal to the engine's"),
        all_of(f"{name}/control_shifted", by_contract, total, "control: rows shifted by one token are refused"),
        all_of(f"{name}/control_completions", completions, routes, "control: rows of /v1/completions get HTTP 400"),
        *behind,
        all_of(f"{name}/control_router", lost, 2, "control: fields that the router drops are missed by the client"),
    ]


def adapter(context: Context, arm: ArmKind, router: str, own: dict[tuple[str, str], Completion]) -> list[Row]:
    """The engine of a run with its responses asked of the router, against the same without."""
    engine, same = context.engines.open(arm, "trained", max_concurrency=4, router=router), 0
    for wanted, alone in own.items():
        (found,) = context.engines.replay(engine, [Case("", "", *wanted).request])
        equal = [np.array_equal(found.response_ids, alone.response_ids), np.array_equal(found.commit, alone.commit)]
        if found.support is not None and alone.support is not None:
            equal.append(np.array_equal(found.support.token_ids, alone.support.token_ids))
            equal.append(np.array_equal(found.support.logprobs, alone.support.logprobs))
        same += len(equal) == 4 and all(equal)
    return [all_of(f"collection/{arm}/adapter", same, len(own), "as without the router, bit for bit")]


def ask(client: httpx.Client, case: Case, carry: bool | None = None) -> Reply:
    """carry: whether extension fields travel in `session_params`; by default behind the router, which drops others."""
    spec = case.request.spec
    extension: dict[str, Any] = {"custom_params": {"sc": request_fields(spec)}}
    sampling: dict[str, Any] = {"temperature": spec.temperature, "top_k": spec.top_k or -1, "top_p": spec.top_p}
    if case.request.stop_strings:
        sampling["stop"] = list(case.request.stop_strings)
    carried = case.route == "router" if carry is None else carry
    if case.dialect == "native":
        sampling["max_new_tokens"] = MAX_NEW_TOKENS
        placed = {"session_params": extension} if carried else {}
        body = {"text": PROMPT, "sampling_params": sampling if carried else sampling | extension, **placed}
        answer = _post(client, "/generate", body)
        meta, reason = answer["meta_info"], answer["meta_info"]["finish_reason"]
        prompt_ids, ids, text = case.request.prompt_ids.tolist(), answer["output_ids"], answer["text"]
        finish, matched = reason["type"], reason.get("matched")
    else:
        extension |= {"return_meta_info": True, "return_token_ids": True}
        chat = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": MAX_NEW_TOKENS}
        body = chat | sampling | ({"session_params": extension} if carried else extension)
        choice = _post(client, "/v1/chat/completions", body)["choices"][0]
        meta, text = choice.get("meta_info", {}), choice["message"]["content"]
        prompt_ids, ids = choice.get("prompt_token_ids", []), choice.get("response_token_ids", [])
        finish, matched = choice["finish_reason"], choice["matched_stop"]
    if "sc" not in meta:
        raise SupportError(f"{case.name}: support rows were asked for and none came back")
    rows, commit = unpack(meta["sc"])
    return Reply(prompt_ids, ids, text, finish, matched, rows, commit)


def require(case: Case, reply: Reply, expected: Completion, model: Model) -> None:
    """Raise SupportError for the first thing that is wrong with a reply."""

    def expect(holds: Any, complaint: str) -> None:
        if not holds:
            raise SupportError(complaint)

    ids, rows = np.array(reply.ids, np.int32), reply.rows
    rows.check(ids, model.vocab_size)
    expect((rows.status == Status.OK).all(), "a row is not OK")
    size = CAPTURES[case.capture].get("head_size")
    expect(size is None or (rows.lengths == size).all(), f"a head row has not {size} entries")
    expect(reply.prompt_ids == expected.prompt_ids.tolist(), "the prompt's ids differ from the engine's")
    expect(np.array_equal(ids, expected.response_ids), "the response's ids differ from the engine's")
    expect(np.array_equal(reply.commit, expected.commit), "the commit kinds differ from the engine's")
    own = expected.support
    assert own is not None
    for name in ("token_ids", "logprobs", "offsets", "sampled_logprobs", "status"):
        expect(np.array_equal(getattr(rows, name), getattr(own, name)), f"{name} differ from the engine's")
    expect(rows.kind == own.kind, f"rows are {rows.kind}, the engine's {own.kind}")

    whole = model.decode(ids)
    expect(reply.finish == "stop", f"finished by {reply.finish}")
    if case.end == "eos":
        expect(reply.matched == addition.EOS_ID == ids[-1], f"matched {reply.matched}, last id {ids[-1]}")
        expect(reply.text == model.decode(ids[:-1]), "the text is not that of the ids before the end token")
    else:
        expect(reply.matched == STOP, f"matched {reply.matched!r}")
        expect(whole.endswith(STOP) and reply.text == whole.removesuffix(STOP), "text or ids do not end at the stop")


def shift(reply: Reply) -> Reply:
    """Every row moved to the token before its own, the first to the last."""
    moved = SupportRows.concatenate([reply.rows[1:], reply.rows[:1]])
    return Reply(reply.prompt_ids, reply.ids, reply.text, reply.finish, reply.matched, moved, reply.commit)


def _refuses(action: Callable[[], Any]) -> bool:
    try:
        action()
    except SupportError:
        return True
    return False


def _completion_is_refused(client: httpx.Client, packed: int) -> bool:
    sc = request_fields(SamplingSpec(capture="head"))
    wanted = {"custom_params": {"sc": sc}} if packed else {"return_sampling_mask": True}
    answer = client.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT, **wanted})
    return answer.status_code == 400 and "/v1/completions" in answer.text


def _post(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(path, json=body)
    if answer.status_code != 200:
        raise httpx.HTTPError(f"{path} answered {answer.status_code}: {answer.text[:300]}")
    return answer.json()
