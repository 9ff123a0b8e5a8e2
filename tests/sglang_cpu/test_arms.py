"""The real sglang server, one for each arm in turn: rows, commit kinds, refusals, weight updates."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import requests
from safetensors.torch import load_file, save_file

from miles_ext.capability import FILTERED_PATCHES, VERIFIER_OF, ArmKind, EngineCapability, require
from miles_ext.errors import CapabilityError
from miles_ext.records import Commit, Status, SupportRows
from miles_ext.sampling import SamplingSpec
from miles_ext.sglang_plugin.report import from_json
from miles_ext.tensors import digest
from miles_ext.wire import unpack
from tests.sglang_cpu.answers import EOS, PROMPTS, VOCABULARY, ask, check, check_commits, params
from tests.sglang_cpu.server import TINY, Server, start

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(600)]
SPECS = {
    "filtered": SamplingSpec(temperature=0.7, top_k=32, top_p=0.95),
    "top_p": SamplingSpec(top_p=0.95),
    "complete": SamplingSpec(),
    "head": SamplingSpec(capture="head", head_size=32),
    "head_hot": SamplingSpec(temperature=1.3, capture="head", head_size=128),
}
resident_at_start: dict[str, str] = {}


@pytest.fixture(scope="module", params=["regular", "dflash", "dflash2"])
def arm(request: pytest.FixtureRequest) -> ArmKind:
    return request.param


@pytest.fixture(scope="module")
def server(arm: ArmKind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = start(arm, tmp_path_factory.mktemp(arm))
    try:
        yield started
    finally:
        started.stop()


def capability(server: Server) -> EngineCapability:
    (rank,) = server.ranks()
    return from_json(rank)


def test_capability_is_that_of_the_loaded_worker(server: Server, arm: ArmKind) -> None:
    found = capability(server)
    assert (found.arm, found.verifier) == (arm, VERIFIER_OF[arm])
    assert found.patches >= FILTERED_PATCHES
    assert found.vocab_size == VOCABULARY and found.max_support == 4096
    assert found.extra["complaints"] == ""
    for spec in SPECS.values():
        require(found, spec, arm, allow_test_verifier=True)
    if arm == "regular":
        require(found, SPECS["filtered"], arm)
    else:
        assert found.dflash_sampling_verify_available
        with pytest.raises(CapabilityError, match="verifier implementation is 'test'"):
            require(found, SPECS["filtered"], arm)


def test_the_target_is_the_same_in_every_arm(server: Server, arm: ArmKind) -> None:
    resident_at_start[arm] = capability(server).resident_digest
    assert len(set(resident_at_start.values())) == 1  # no draft's mask embedding has been merged into it


@pytest.mark.parametrize("name", SPECS)
def test_every_row_is_valid_and_every_token_has_its_kind(server: Server, arm: ArmKind, name: str) -> None:
    answers = ask(server, PROMPTS, SPECS[name], max_new_tokens=60)
    for answer in answers:
        check(answer)
        check_commits(answer, arm)
        if answer.meta["finish_reason"]["type"] == "stop":
            assert answer.ids[-1] == EOS
    if arm != "regular":
        kinds = np.concatenate([answer.commit for answer in answers])
        assert {Commit.PREFILL, Commit.DRAFT, Commit.REJECT_BONUS} <= set(kinds.tolist())


def test_mixed_requests_in_one_batch(server: Server) -> None:
    names = [*SPECS, "none"]
    each = [params(SPECS[name]) if name in SPECS else {"temperature": 1.0, "top_k": 5} for name in names]
    each = [{**one, "max_new_tokens": 30} for one in each]
    items = server.generate({"input_ids": [PROMPTS[i % 4] for i in range(len(names))], "sampling_params": each})
    for name, item in zip(names, items, strict=True):
        if name == "none":
            assert "sc" not in item["meta_info"]
            continue
        rows, _ = unpack(item["meta_info"]["sc"])
        rows.check(np.array(item["output_ids"]), VOCABULARY)
        assert rows.kind == SPECS[name].capture


def test_heads_agree_with_the_logprobs_that_sglang_returns(server: Server) -> None:
    body = {
        "input_ids": PROMPTS[0], "sampling_params": params(SPECS["head"], max_new_tokens=40),
        "return_logprob": True, "top_logprobs_num": 32,
    }  # fmt: skip
    meta = server.generate(body)["meta_info"]
    rows, _ = unpack(meta["sc"])
    stock = np.array([[entry[0] for entry in row] for row in meta["output_top_logprobs"]])
    assert np.abs(rows.logprobs.reshape(stock.shape) - stock).max() < 1e-4
    sampled = np.array([entry[0] for entry in meta["output_token_logprobs"]])
    assert np.abs(rows.sampled_logprobs - sampled).max() < 1e-4


def test_row_t_is_the_law_after_the_first_t_tokens(server: Server) -> None:
    """A prompt that ends where row t begins: the regular sampler draws its prefill token from the law of row t."""
    (answer,) = ask(server, [PROMPTS[1]], SPECS["complete"], max_new_tokens=12, ignore_eos=True)
    prefixes = [answer.prompt + answer.ids[:t] for t in range(len(answer.ids))]
    again = [dense(one.rows) for one in ask(server, prefixes, SPECS["complete"], max_new_tokens=1)]
    recorded = dense(answer.rows)
    apart = np.abs(np.concatenate(again) - recorded).sum(1)
    neighbours = np.abs(recorded[1:] - recorded[:-1]).sum(1)
    assert apart.max() < 0.15  # bfloat16 and other kernels for other lengths, not other laws
    assert neighbours.mean() > 5 * apart.mean()


def dense(rows: SupportRows) -> np.ndarray:
    probs = np.zeros((len(rows), VOCABULARY))
    probs[np.repeat(np.arange(len(rows)), rows.lengths), rows.token_ids] = np.exp(rows.logprobs)
    return probs


def test_stop_strings_trim_the_text_and_not_the_rows(server: Server, arm: ArmKind) -> None:
    (free,) = ask(server, [PROMPTS[3]], SamplingSpec(top_k=1), max_new_tokens=24, ignore_eos=True)
    middle = free.text.split()[len(free.text.split()) // 2] if " " in free.text else free.text[len(free.text) // 2]
    for answer in ask(server, PROMPTS, SPECS["filtered"], max_new_tokens=40, stop=[middle]):
        check(answer)
        check_commits(answer, arm)
        assert middle not in answer.text
        if answer.meta["finish_reason"].get("matched") == middle:
            assert len(answer.ids) == len(answer.rows)


def test_overflow_ends_the_response_and_loses_nothing(server: Server) -> None:
    spec = SamplingSpec(temperature=2.0, top_p=0.999, max_support=2)
    (answer,) = ask(server, [PROMPTS[0]], spec, max_new_tokens=40, ignore_eos=True)
    assert Status.OVERFLOW in answer.rows.status.tolist()
    assert len(answer.rows) == len(answer.ids) < 40
    assert answer.meta["finish_reason"]["type"] == "abort"
    assert not answer.rows.lengths[answer.rows.status != 0].any()


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"min_p": 0.1}, "min_p is 0.1"),
        (params(SamplingSpec(filter_order="joint", top_k=4)), "filter order is 'joint'"),
        (params(SamplingSpec(max_support=5000, top_k=4)), "--sampling-mask-max-tokens is 4096"),
        ({**params(SPECS["head"]), "top_k": 4}, "a head of the unfiltered law"),
        # sglang prefills a token of what it refuses: these numbers must not be used for it.
        ({"top_k": 4, "custom_params": {"sc": {"v": 1, "capture": "head", "k": 4096, "order": "top_k_first"}}}, "head"),
        ({"custom_params": {"sc": {"v": 1, "capture": "complete", "k": "x", "order": "top_k_first"}}}, "k is 'x'"),
    ],
)
def test_refusals_are_400_and_leave_the_server_well(server: Server, bad: dict, words: str) -> None:
    answer = server.post("/generate", {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4, **bad}})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    check(ask(server, [PROMPTS[0]], SPECS["filtered"], max_new_tokens=4)[0])


def test_thresholds_cannot_be_loosened(server: Server) -> None:
    body = {"server_args": {"speculative_accept_threshold_acc": 0.9}}
    server.post("/set_internal_state", body)
    assert capability(server).accept_threshold_acc == 1.0


def test_a_retracted_request_has_its_prefill_token_again(server: Server, arm: ArmKind) -> None:
    answers = ask(server, [[i + 1, 2, 3] for i in range(6)], SPECS["filtered"], max_new_tokens=100, ignore_eos=True)
    for answer in answers:
        check(answer)
        check_commits(answer, arm)
    assert any((answer.commit[1:] == Commit.PREFILL).any() for answer in answers)


def test_a_disk_update_reaches_the_target_only(server: Server, arm: ArmKind, tmp_path: Path) -> None:
    before = capability(server)
    changed = tmp_path / "target"
    shutil.copytree(TINY / "target", changed)
    tensors = {name: tensor + 0.01 for name, tensor in load_file(changed / "model.safetensors").items()}
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})

    after = update(server, changed, "7")
    assert after.weight_version == 7
    assert after.extra["received_digest"] == digest(tensors)
    assert after.resident_digest != before.resident_digest
    assert after.draft_digest == before.draft_digest
    assert (after.draft_digest == "") == (arm == "regular")
    (answer,) = ask(server, [PROMPTS[0]], SPECS["filtered"], max_new_tokens=8)
    check(answer)
    assert answer.meta["weight_version"] == "7"

    back = update(server, TINY / "target", "8")
    assert back.resident_digest == before.resident_digest
    assert back.draft_digest == before.draft_digest


def test_a_failed_update_changes_nothing(server: Server, tmp_path: Path) -> None:
    before = capability(server)
    answer = server.post("/update_weights_from_disk", {"model_path": str(tmp_path / "nowhere")})
    assert not answer.json()["success"]
    after = capability(server)
    assert after.resident_digest == before.resident_digest
    assert after.extra["received_digest"] == ""


def test_the_draft_cannot_be_selected_for_an_update(server: Server) -> None:
    answer = server.post("/begin_weight_update", {"selector": "draft"}).json()
    assert not answer["success"] and "private" in answer["message"]


def test_checksums_still_cover_the_draft(server: Server, arm: ArmKind) -> None:
    answer = server.post("/weights_checker", {"action": "checksum"}).json()
    names = answer["ranks"][0]["checksums"]
    assert any(name.startswith("draft.") for name in names) == (arm != "regular")


def update(server: Server, model: Path, version: str) -> EngineCapability:
    answer = server.post("/update_weights_from_disk", {"model_path": str(model), "weight_version": version})
    assert answer.status_code == 200 and answer.json()["success"], answer.text
    return capability(server)


def test_the_chat_endpoint_carries_the_rows(server: Server) -> None:
    body = {
        "model": "default", "messages": [{"role": "user", "content": "1+1="}], "max_tokens": 8,
        "return_meta_info": True, "temperature": 0.7, "top_k": 32, "top_p": 0.95,
        "custom_params": params(SPECS["filtered"])["custom_params"],
    }  # fmt: skip
    answer = requests.post(server.url + "/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.text)["choices"][0]["meta_info"]["sc"]["kind"] == "complete"
