"""POST /generate against the engine itself: same tokens, same rows, stock fields, stops, and failures of content."""

from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest
import torch

from experiments.tasks import addition
from miles_ext.wire import unpack
from tests.rollout.served import PROMPT, PROMPT_IDS, Served, load, request, sc, serving


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as one:
        yield one


def generate(served: Served, sampling: dict | None = None, **fields) -> dict:
    return served.post("/generate", {"text": PROMPT, "sampling_params": sampling or {}, **fields})


@pytest.mark.parametrize(
    ("filters", "capture"),
    [
        ({}, {"capture": "head", "head_size": 32}),
        ({}, {"capture": "complete", "max_support": 512}),
        ({"temperature": 3.0, "top_k": 4, "top_p": 0.6, "filter_order": "joint"}, {"max_support": 64}),  # orders differ
    ],
)
def test_packed_rows_are_the_engines_own(served: Served, filters: dict, capture: dict) -> None:
    own = load().generate([request(5, **filters, **capture)])[0]
    spec = request(5, **filters, **capture).spec
    order, k = spec.filter_order, spec.head_size if spec.capture == "head" else spec.max_support
    sampling = {name: value for name, value in filters.items() if name != "filter_order"}
    answer = generate(
        served, {**sampling, "max_new_tokens": 60, "custom_params": sc(spec.capture, k, seed=5, order=order)}
    )
    assert answer["output_ids"] == own.response_ids.tolist()
    assert answer["text"] == own.text
    rows, commit = unpack(answer["meta_info"]["sc"])
    assert own.support is not None
    for name in ("token_ids", "logprobs", "offsets", "sampled_logprobs", "status"):
        np.testing.assert_array_equal(getattr(rows, name), getattr(own.support, name))
    np.testing.assert_array_equal(commit, own.commit)


def test_meta_info_names_and_counts_are_sglangs(served: Served) -> None:
    meta = generate(served, {"custom_params": sc(seed=3)}, rid="mine")["meta_info"]
    tokens = meta["completion_tokens"]
    assert meta["id"] == "mine" and meta["prompt_tokens"] == len(PROMPT_IDS) and meta["cached_tokens"] == 0
    assert meta["weight_version"] == "0"
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": tokens}]
    assert meta["spec_accept_length"] == pytest.approx(tokens / meta["spec_verify_ct"])
    assert meta["spec_accept_rate"] == meta["spec_num_correct_drafts"] / meta["spec_num_proposed_drafts"] > 0


def test_text_ends_before_the_stop_and_ids_do_not(served: Served) -> None:
    at_eos = generate(served, {"sampling_seed": 1})
    assert at_eos["meta_info"]["finish_reason"] == {"type": "stop", "matched": addition.EOS_ID}
    assert at_eos["text"] + "\n" == addition.decode(at_eos["output_ids"])

    at_string = generate(served, {"sampling_seed": 1, "stop": [";|", "zzz"]})
    assert at_string["meta_info"]["finish_reason"] == {"type": "stop", "matched": ";|"}
    assert at_string["text"] + ";|" == addition.decode(at_string["output_ids"])

    bar = addition.CHARACTERS.index("|")
    at_id = generate(served, {"sampling_seed": 1, "stop_token_ids": [bar]})
    assert at_id["meta_info"]["finish_reason"] == {"type": "stop", "matched": bar}
    assert at_id["text"] + "|" == addition.decode(at_id["output_ids"])

    at_length = generate(served, {"sampling_seed": 1, "max_new_tokens": 60, "ignore_eos": True})
    assert at_length["meta_info"]["finish_reason"] == {"type": "length", "length": 60}
    assert len(at_length["output_ids"]) == 60 and addition.EOS_ID in at_length["output_ids"]


@pytest.mark.parametrize("mode", ["selected", "support"])
def test_stock_mask_is_the_whole_filtered_support(served: Served, mode: str) -> None:
    sampling = {"temperature": 2.0, "top_k": 6, "sampling_seed": 2}
    meta = generate(served, sampling, return_sampling_mask=True, sampling_logprobs_mode=mode)
    ids, info = meta["output_ids"], meta["meta_info"]
    masks, logprobs = info["output_token_sampling_mask"], info["output_token_sampling_logprobs"]
    assert info["output_token_sampling_mask_length"] == len(ids) == len(masks) == len(logprobs)
    assert max(map(len, masks)) > 1
    for token, mask, row in zip(ids, masks, logprobs, strict=True):
        assert token in mask
        if mode == "support":
            assert row == sorted(row, reverse=True) and sum(np.exp(row)) == pytest.approx(1, abs=2e-5)


def test_stock_logprobs_are_of_the_unfiltered_law(served: Served) -> None:
    meta = generate(served, {"sampling_seed": 4}, return_logprob=True, top_logprobs_num=3, return_text_in_logprobs=True)
    own = load().generate([request(4, max_new_tokens=128, capture="head", head_size=3)])[0]
    info = meta["meta_info"]
    assert own.support is not None
    assert [one[:2] for one in info["output_token_logprobs"]] == [
        [logprob, token]
        for logprob, token in zip(own.support.sampled_logprobs.tolist(), own.response_ids.tolist(), strict=True)
    ]
    assert info["output_token_logprobs"][0][2] == addition.decode(own.response_ids[:1].tolist())
    assert np.array(info["output_top_logprobs"], object)[:, :, 1].ravel().tolist() == own.support.token_ids.tolist()
    assert info["input_token_logprobs"] == []


def test_batches_answer_in_order_each_with_its_own_seed(served: Served) -> None:
    seeds = [11, 12, 13]
    bodies = [{"sampling_seed": seed, "max_new_tokens": 20, "temperature": 3.0} for seed in seeds]
    together = served.post("/generate", {"input_ids": [PROMPT_IDS.tolist()] * 3, "sampling_params": bodies})
    alone = [generate(served, body) for body in bodies]
    assert [one["output_ids"] for one in together] == [one["output_ids"] for one in alone]
    assert len({tuple(one["output_ids"]) for one in alone}) > 1
    one_text = served.post("/generate", {"text": [PROMPT], "sampling_params": bodies[0]})
    assert [one["output_ids"] for one in one_text] == [alone[0]["output_ids"]]


def test_without_a_seed_every_answer_has_its_own(served: Served) -> None:
    answers = served.post("/generate", {"text": [PROMPT] * 6, "sampling_params": {"temperature": 3.0}})
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 6


def test_a_carrier_that_a_gateway_lets_through_means_the_same(served: Served) -> None:
    plain = generate(served, {"custom_params": sc(seed=8)})
    carried = generate(served, session_params={"custom_params": sc(seed=8)})
    assert carried["output_ids"] == plain["output_ids"]
    assert carried["meta_info"]["sc"] == plain["meta_info"]["sc"]
    twice = {"custom_params": sc(seed=8)}
    assert "give it once" in served.refusal(
        "/generate", {"text": PROMPT, "sampling_params": twice, "session_params": twice}
    )


def test_overflow_is_400_and_nothing_is_cut_short(served: Served) -> None:
    body = {"text": PROMPT, "sampling_params": {"temperature": 2.0, "custom_params": sc("complete", 600, seed=1)}}
    served.post("/generate", body)
    body["sampling_params"] |= {"top_k": 8, "custom_params": sc("complete", 2, seed=1)}
    assert "more than k = 2" in served.refusal("/generate", body)
    assert served.client.get("/health_generate").status_code == 200


def test_a_law_that_is_not_finite_is_500_and_the_server_lives(served: Served) -> None:
    broken = served.engine.target.logits
    with patch.object(served.engine.target, "logits", lambda hidden: broken(hidden) * torch.nan):
        for sampling in ({"custom_params": sc(seed=1)}, {}):
            body = {"text": PROMPT, "sampling_params": sampling}
            assert "not finite" in served.refusal("/generate", body, 500)
        assert served.client.get("/health_generate").status_code == 503
    assert served.client.get("/health_generate").status_code == 200
