"""Part `refusals`: what cannot be honoured is a 400 or an early end, and the server goes on."""

from __future__ import annotations

from typing import Any

from experiments.evidence import Row
from miles_ext.capability import ArmKind, require
from miles_ext.errors import CapabilityError
from miles_ext.records import Status
from miles_ext.sampling import SamplingSpec
from miles_ext.sglang_plugin.report import from_json
from tests.sglang_cpu.answers import PROMPTS, ask, check, params
from tests.sglang_cpu.server import Server

FILTERED = SamplingSpec(temperature=0.7, top_k=32, top_p=0.95)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "min_p": ({"min_p": 0.1}, "min_p is 0.1"),
    "other order": (params(SamplingSpec(filter_order="joint", top_k=4)), "filter order is 'joint'"),
    "k above the cap": (params(SamplingSpec(max_support=5000, top_k=4)), "--sampling-mask-max-tokens is 4096"),
    "filtered head": ({**params(SamplingSpec(capture="head")), "top_k": 4}, "a head of the unfiltered law"),
}


def rows(server: Server, arm: ArmKind) -> list[Row]:
    found = [refused(server, f"refusals/{arm} {name}", fields, words) for name, (fields, words) in BAD.items()]
    return [*found, overflow(server, arm)]


def refused(server: Server, name: str, fields: dict[str, Any], words: str) -> Row:
    body = {"input_ids": PROMPTS[0], "sampling_params": {"max_new_tokens": 4, **fields}}
    answer = server.post("/generate", body)
    (after,) = ask(server, [PROMPTS[0]], FILTERED, max_new_tokens=4)
    check(after)
    return Row(name, answer.status_code, "status", "400", answer.status_code == 400 and words in answer.text, words)


def overflow(server: Server, arm: ArmKind) -> Row:
    """The response ends at the row that does not fit, which is empty, and keeps what came before."""
    spec = SamplingSpec(temperature=2.0, top_p=0.999, max_support=2)
    (answer,) = ask(server, [PROMPTS[0]], spec, max_new_tokens=40, ignore_eos=True)
    reason, statuses = answer.meta["finish_reason"], answer.rows.status.tolist()
    over = statuses.count(Status.OVERFLOW)
    ended = reason["type"] == "abort" and len(answer.ids) == len(answer.rows) < 40
    empty = not answer.rows.lengths[answer.rows.status != Status.OK].any()
    detail = f"{len(answer.ids)} tokens returned, finish reason {reason['type']}: {reason.get('message', '')}"
    held = bool(over and ended and empty)
    return Row(f"refusals/{arm} overflow", over, "rows", "abort, none cut short", held, detail)


def without_verifier(server: Server) -> list[Row]:
    """A dflash server that lost its sampling verifier: sampled requests would be verified greedily."""
    found = from_json(server.ranks()[0])
    try:
        require(found, FILTERED, "dflash")
        said = ""
    except CapabilityError as error:
        said = str(error)
    available = found.dflash_sampling_verify_available
    result = [Row("refusals/no verifier, capability", available, "available", "0 and refused", not available and
                  "greedy fallback" in said, said)]  # fmt: skip
    for name, fields in (("captured", params(FILTERED)), ("plain", {"top_k": 8})):
        answer = server.post("/generate", {"input_ids": PROMPTS[0], "sampling_params": {"max_new_tokens": 8, **fields}})
        held = answer.status_code == 400 and "verified greedily" in answer.text
        name = f"refusals/no verifier, {name}"
        result.append(Row(name, answer.status_code, "status", "400", held, answer.text[:160]))
    greedy = server.post("/generate", {"input_ids": PROMPTS[0], "sampling_params": {"temperature": 0}}).status_code
    return [*result, Row("refusals/no verifier, greedy", greedy, "status", "200", greedy == 200)]
