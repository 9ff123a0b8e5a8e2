"""Rollouts through Miles' own rollout function and router, with the embedded engine behind HTTP."""

from __future__ import annotations

import asyncio
import copy
import functools
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from experiments.tasks import addition
from miles_ext.errors import CapabilityError, SupportError
from miles_ext.miles_adapter import samples
from miles_ext.miles_adapter.arguments import spec_of
from rollout.server.running import running
from tests.miles.hooks import Unset, full_arguments
from tests.rollout.served import PROMPT, TINY, Served, serving

EOS = addition.EOS_ID


@pytest.fixture(scope="module")
def served():
    with serving("dflash2") as one:
        yield one


class Between:
    """A proxy in front of the engine that can tamper with requests and answers, and counts them."""

    def __init__(self, url: str) -> None:
        self.url, self.address, self.requests = url, "", 0
        self.change_request = self.change_answer = lambda body: body
        self.app = FastAPI()
        self.app.post("/abort_request")(self.abort)
        self.app.post("/generate")(self.generate)
        self.app.get("/{path:path}")(self.forward)

    async def abort(self) -> dict:
        return {}

    async def forward(self, path: str) -> JSONResponse:
        async with httpx.AsyncClient(timeout=60) as http:
            answer = await http.get(f"{self.url}/{path}")
        found = answer.json() if answer.content else {}
        for state in found.get("internal_states", ()):
            for rank in state["sc"]["ranks"]:
                rank["patches"] += ["target_only_weights"]  # as the plugin reports; the embedded engine knows no other
        return JSONResponse(found, answer.status_code)

    async def generate(self, request: Request) -> JSONResponse:
        self.requests += 1
        body = self.change_request(await request.json())
        body.pop("return_indexer_topk", None)  # what sglang takes and the embedded engine does not: text and replay
        for name in ("skip_special_tokens", "no_stop_trim", "spaces_between_special_tokens"):
            body["sampling_params"].pop(name)
        async with httpx.AsyncClient(timeout=60) as http:
            answer = await http.post(f"{self.url}/generate", json=body)
        found = answer.json()
        return JSONResponse(self.change_answer(found) if answer.status_code == 200 else found, answer.status_code)


@pytest.fixture
def between(served: Served):
    one = Between(str(served.client.base_url))
    with running(one.app) as url:
        one.address = url
        yield one


@pytest.fixture
def args(between, monkeypatch):
    """Arguments of a run whose requests go through the real Miles router to `between`."""
    import starlette.routing
    from miles.router.router import MilesRouter

    # Miles' router was written for a Starlette whose applications list what to start; its health check stays off.
    monkeypatch.setattr(starlette.routing.Router, "on_startup", [], raising=False)
    monkeypatch.setattr("miles.utils.dumper_utils._get_phase_override_configs", lambda *_: {})  # sglang's dumper, off
    made = full_arguments(
        hf_checkpoint=str(TINY / "target"), rollout_max_response_len=12, rollout_max_context_len=None, rollout_seed=0,
        sglang_server_concurrency=8, rollout_num_gpus=1, rollout_num_gpus_per_engine=1, rollout_global_dataset=True,
        rollout_batch_size=2, n_samples_per_prompt=2, over_sampling_batch_size=2, global_batch_size=4,
        use_rollout_routing_replay=False, use_rollout_indexer_replay=False, miles_router_middleware_paths=[],
        rollout_stop_token_ids=[EOS], rollout_skip_special_tokens=False, group_rm=False, sglang_router_policy=None,
        custom_rm_path="tests.miles.test_rollout.reward", sglang_speculative_algorithm="DFLASH", sc_arm="dflash2",
        sglang_enable_deterministic_inference=False, mask_offpolicy_in_partial_rollout=False, apply_chat_template=False,
        lora_rank=0, rollout_health_check_interval=3600,
         lora_adapter_path=None, rollout_temperature=0.7, rollout_top_k=8, rollout_top_p=0.95,
    )  # fmt: skip
    with running(MilesRouter(made).app) as url:
        httpx.post(f"{url}/add_worker", params={"url": between.address}).raise_for_status()
        host, port = url.removeprefix("http://").split(":")
        made.sglang_router_ip, made.sglang_router_port = host, int(port)
        yield made


async def reward(args, sample, **_) -> float:
    return float(len(sample.response))


class Prompts:
    """A data source that counts what it hands out."""

    def __init__(self, group: int = 2) -> None:
        self.given, self.group, self.returned = 0, group, []

    def get_samples(self, count: int):
        from miles.utils.types import Sample

        groups = []
        for _ in range(count):
            first = self.given
            groups.append([Sample(prompt=PROMPT, index=first + n, group_index=first) for n in range(self.group)])
            self.given += self.group
        return groups

    def add_samples(self, groups) -> None:
        self.returned += groups


@asynccontextmanager
async def client(monkeypatch):
    from miles.utils import http_utils

    post = getattr(http_utils._post, "__wrapped__", http_utils._post)

    @functools.wraps(post)
    def once(client, url, payload, _, **rest):
        return post(client, url, payload, 1, **rest)  # Miles tries sixty times, a second apart

    async with httpx.AsyncClient(timeout=60) as http:
        monkeypatch.setattr(http_utils, "_http_client", http)
        monkeypatch.setattr(http_utils, "_post", once)
        yield


def rollout(args, monkeypatch, *, source=None, evaluation=False):
    """One call of the rollout function that a fresh rollout manager would make."""
    from miles.rollout.base_types import RolloutFnConstructorInput
    from miles.rollout.inference_rollout.compatibility import load_rollout_function

    function = load_rollout_function(RolloutFnConstructorInput(args, source or Prompts()), args.rollout_function_path)
    return call(function, monkeypatch, evaluation=evaluation), function


def call(function, monkeypatch, *, evaluation=False):
    async def once():
        async with client(monkeypatch):
            given = SimpleNamespace(rollout_id=0, evaluation=evaluation, weight_version=None, generate_state=None)
            return await asyncio.wait_for(function(given), 120)

    return asyncio.run(once())


def test_a_rollout_records_the_law_of_every_token(args, between, monkeypatch):
    output, function = rollout(args, monkeypatch)
    groups = output.samples
    assert [len(group) for group in groups] == [2, 2] and function.state.sc_watch.proof is not None
    spec = spec_of(args)
    for sample in (sample for group in groups for sample in group):
        response = sample.tokens[-sample.response_length :]
        held = samples.rows_of(sample)
        assert held is not None and held.vocab_size == function.state.sc_watch.proof.vocab_size
        held.require(response, spec, "the sample")
        sample.validate()
        assert sample.tokens[: -sample.response_length] == addition.encode(PROMPT)
        assert np.array_equal(np.float32(sample.rollout_log_probs), held.rows.sampled_logprobs)
        assert sample.reward == len(sample.response) and sample.spec_info.spec_verify_ct >= 0
        assert len(sample.weight_versions) == 1 and held.rows.lengths.max() <= 8
    assert between.requests == 4


def test_the_trainer_takes_what_the_rollout_made(args, between, monkeypatch):
    """Not a stand-in for the law: the target model itself, in float64, at the rollout's temperature and filters."""
    output, _ = rollout(args, monkeypatch)
    from miles_ext.law import law
    from tests.rollout.served import load

    target = load("regular").target
    for sample in (sample for group in output.samples for sample in group):
        held = samples.rows_of(sample)
        assert held is not None
        logits = logits_of(target, sample.tokens)[-sample.response_length - 1 : -1]
        wanted = law(logits, 0.7, 8, 0.95)
        for row, at in enumerate(range(sample.response_length)):
            ids = held.rows[row : row + 1].token_ids
            assert set(ids.tolist()) == set(np.flatnonzero(wanted[at].numpy()).tolist())
            gap = np.exp(held.rows[row : row + 1].logprobs) - wanted[at].numpy()[ids]
            assert np.abs(gap).max() < 1e-4


def logits_of(target, tokens):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def test_evaluation_records_nothing(args, monkeypatch):
    args.eval_datasets = []
    output, _ = rollout(args, monkeypatch, evaluation=True)
    assert output.data == {}


def test_a_partial_rollout_goes_on_where_it_stopped(args, between, monkeypatch):
    """Aborted after 3 tokens, kept, and finished in the next rollout: one row a token, from both calls."""
    args.partial_rollout = True

    def cut(body):
        body["sampling_params"]["max_new_tokens"] = min(3, body["sampling_params"]["max_new_tokens"])
        return body

    def aborted(answer):
        answer["meta_info"]["finish_reason"] = {"type": "abort", "message": "paused"}
        return answer

    between.change_request, between.change_answer = cut, aborted
    output, function = rollout(args, monkeypatch)
    group = output.samples[0]
    (sample, *_) = [sample for sample in group if sample.response_length == 3]
    first = samples.rows_of(sample)
    assert first is not None and sample.status.value == "aborted" and len(first) == 3
    head = list(sample.tokens)

    between.change_request = between.change_answer = lambda body: body
    sample.loss_mask = [0] * 3  # as Miles masks what older weights said
    kept = copy.deepcopy(type(sample).from_dict(sample.to_dict()))

    class Kept(Prompts):
        def get_samples(self, count):
            return [[kept, super().get_samples(1)[0][0]], *super().get_samples(count - 1)]

    function.data_source = Kept()
    call(function, monkeypatch)
    held = samples.rows_of(kept)
    assert held is not None and kept.tokens[: len(head)] == head and kept.response_length > 3
    held.require(kept.tokens[-kept.response_length :], spec_of(args), "the sample")
    assert kept.response_length <= 12 and held.rows[:3].logprobs.tobytes() == first.rows.logprobs.tobytes()
    assert kept.loss_mask == [0] * 3 + [1] * (kept.response_length - 3)
    kept.validate()


def strip_request(body):
    body["sampling_params"].pop("custom_params", None)
    return body


def strip_answer(answer):
    answer["meta_info"].pop("sc", None)
    return answer


def shorter(answer):
    answer["output_ids"] = answer["output_ids"][:-1]
    return answer


def other_token(answer):
    answer["output_ids"][0] = (answer["output_ids"][0] + 1) % 10 + 3
    return answer


def beyond_the_vocabulary(answer):
    answer["output_ids"][0] = 10**6
    return answer


def no_object(answer):
    answer["meta_info"]["sc"] = ["rows"]
    return answer


def other_kind(answer):
    answer["meta_info"]["sc"]["kind"] = "head"
    return answer


def words(answer):
    answer["output_ids"] = [str(one) for one in answer["output_ids"]]
    return answer


def no_text(answer):
    answer["meta_info"].pop("finish_reason")
    return answer


def no_ids(answer):
    return {"text": answer["text"], "meta_info": answer["meta_info"]}


@pytest.mark.parametrize(
    ("request_change", "answer_change", "match"),
    [
        (strip_request, None, "without the rows that were asked for: the router or the engine dropped"),
        (None, strip_answer, "without the rows that were asked for"),
        (None, shorter, "support rows for a response of"),
        (None, other_token, "support row 0: the committed token"),
        (None, no_ids, "without meta_info and output_ids"),
        (None, other_kind, "rows of kind 'head'; accepted: 'complete'"),
        (None, words, "without meta_info and output_ids"),
        (None, beyond_the_vocabulary, "token ids .* to 1000000; accepted: 0 to"),
        (None, no_object, r"meta_info.sc is \"\['rows'\]\"; accepted: an object"),
        (None, no_text, "finish_reason"),
    ],
    ids=["request", "answer", "length", "token", "ids", "kind", "words", "range", "object", "reason"],
)
def test_a_router_that_takes_something_away_stops_the_rollout(
    request_change, answer_change, match, args, between, monkeypatch
):
    """Miles alone would log the error of each request and sample for ever."""
    between.change_request = request_change or between.change_request
    between.change_answer = answer_change or between.change_answer
    source = Prompts()
    with pytest.raises((SupportError, KeyError), match=match):
        rollout(args, monkeypatch, source=source)
    assert source.given <= 8


def test_a_prompt_that_leaves_no_room_has_no_rows(args, between, monkeypatch):
    args.rollout_max_context_len = len(addition.encode(PROMPT))
    output, _ = rollout(args, monkeypatch)
    for sample in (sample for group in output.samples for sample in group):
        held = samples.rows_of(sample)
        assert sample.status.value == "truncated" and held is not None and len(held) == sample.response_length == 0
    assert between.requests == 0


def test_an_engine_that_dies_is_left_to_miles(args, between, monkeypatch):
    """It depends on no content: another group is sampled, and nothing is told to the watch."""
    source, dying = Prompts(), [1, 2]

    def twice(answer):
        if dying:
            raise RuntimeError(f"the engine is gone {dying.pop()}")
        return answer

    between.change_answer = twice
    output, function = rollout(args, monkeypatch, source=source)
    assert len(output.samples) == 2 and function.state.sc_watch.error is None and source.given > 4


def test_miles_alone_would_sample_on(args, between, monkeypatch):
    """The control of the test above: without the watch, the same failures do not end Miles' own loop."""
    between.change_answer, source = strip_answer, Prompts()

    async def alone(rollout, state):
        working = asyncio.ensure_future(rollout)
        while source.given <= 40 and not working.done():
            await asyncio.sleep(0.05)
        working.cancel()
        return "it went on" if source.given > 40 else await working

    monkeypatch.setattr("miles_ext.miles_adapter.rollout.until_failure", alone)
    assert rollout(args, monkeypatch, source=source)[0] == "it went on"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"rollout_temperature": 0.5}, r"\(temperature, top_k, top_p\) \(0.7, 8, 0.95\), the trainer expects \(0.5, 8"),
        ({"extra": {"min_p": 0.1}}, r"sampling parameters \['min_p'\]"),
        ({"extra": {"frequency_penalty": 0.5}}, r"sampling parameters \['frequency_penalty'\]"),
        ({"extra": {"custom_params": {"a": 1}}}, "custom_params"),
    ],
)
def test_a_request_under_another_law_is_not_sent(change, match, args, between, monkeypatch):
    from miles.rollout.base_types import RolloutFnConstructorInput

    from miles_ext.miles_adapter.rollout import RolloutFn

    function = RolloutFn(RolloutFnConstructorInput(args, Prompts()))
    function.state.sampling_params |= change.pop("extra", {})
    for name, value in change.items():
        setattr(args, name, value)
    with pytest.raises(SupportError, match=match):
        call(function, monkeypatch)
    assert between.requests == 0


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"sc_arm": "dflash"}, "loaded arm is 'dflash2', wanted 'dflash'"),
        ({"sglang_speculative_num_draft_tokens": 99}, "99 was asked for, served is unknown to it"),
    ],
)
def test_engines_are_asked_before_the_first_request(change, match, args, between, monkeypatch):
    with pytest.raises(CapabilityError, match=match):
        rollout(Unset(**{**vars(args), **change}), monkeypatch)
    assert between.requests == 0


def test_a_draft_that_changed_between_rollouts_stops_the_run(args, served, monkeypatch):
    from dataclasses import replace as changed

    _, function = rollout(args, monkeypatch)
    honest = served.engine.capability
    monkeypatch.setattr(
        served.engine, "capability", lambda: [changed(one, draft_digest="other") for one in honest()]
    )
    with pytest.raises(CapabilityError, match="the private draft changed"):
        call(function, monkeypatch)


def test_a_refusal_of_the_engine_stops_the_rollout(args, between, monkeypatch):
    def order(body):
        body["sampling_params"]["custom_params"]["sc"]["order"] = "sideways"
        return body

    between.change_request = order
    with pytest.raises(CapabilityError, match="answers 400: .*order"):
        rollout(args, monkeypatch)


def test_generation_needs_the_rollout_function(args, monkeypatch):
    from miles.rollout.base_types import GenerateFnInput
    from miles.rollout.inference_rollout.inference_rollout_common import GenerateState
    from miles.utils.types import Sample

    from miles_ext.miles_adapter.generate import generate

    args.custom_generate_function_path = "miles_ext.miles_adapter.generate.generate"
    state = GenerateState(args)
    given = GenerateFnInput(state, Sample(prompt=PROMPT), dict(state.sampling_params), False)
    with pytest.raises(CapabilityError, match="set --rollout-function-path"):
        asyncio.run(generate(given))


def test_the_old_form_of_rollout_functions_is_refused(args):
    from miles.rollout.base_types import call_rollout_fn
    from miles.utils.misc import load_function

    with pytest.raises(CapabilityError, match="MILES_EXPERIMENTAL_ROLLOUT_REFACTOR=1"):
        call_rollout_fn(load_function(args.rollout_function_path), args, 0, Prompts(), evaluation=False)


def test_features_without_meaning_are_refused_when_the_rollout_manager_starts(args):
    from miles.rollout.base_types import RolloutFnConstructorInput

    from miles_ext.miles_adapter.rollout import RolloutFn

    args.use_tis = True
    with pytest.raises(CapabilityError, match="use_tis is True"):
        RolloutFn(RolloutFnConstructorInput(args, Prompts()))


def test_miles_parser_gets_the_flags(monkeypatch):
    """`add_arguments` where Miles looks for it."""
    from argparse import ArgumentParser

    from miles.utils.misc import load_function

    for path in ("miles_ext.miles_adapter.rollout.RolloutFn", "miles_ext.miles_adapter.generate.generate"):
        parser = ArgumentParser()
        load_function(path).add_arguments(parser)
        assert parser.parse_args(["--sc-mode", "mis"]).sc_mode == "mis"
