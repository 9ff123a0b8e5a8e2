"""What engines must prove before each rollout."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import pytest

from miles_ext.capability import FILTERED_PATCHES, EngineCapability
from miles_ext.errors import CapabilityError
from miles_ext.miles_adapter.arguments import Settings
from miles_ext.miles_adapter.preflight import Proof, prove, require_same_draft
from miles_ext.sampling import SamplingSpec
from miles_ext.sglang_plugin.report import to_json

SPEC = SamplingSpec(top_k=8, top_p=0.9, max_support=64)
SETTINGS = Settings(arm="dflash2")
ASKED = Namespace(sglang_speculative_algorithm="DFLASH", sglang_speculative_num_draft_tokens=8)
GOOD = EngineCapability(
    engine="sglang", engine_version="0.5.23", arm="dflash2", verifier="chain", dflash_sampling_verify_available=True,
    filter_orders=("top_k_first",), max_support=64, patches=FILTERED_PATCHES | {"target_only_weights"}, vocab_size=32,
    draft_digest="d", resident_digest="r", weight_version=3,
)  # fmt: skip


def info(*ranks: EngineCapability, **changes):
    served = {"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 8}
    return {**served, **changes, "internal_states": [{"sc": {"ranks": [to_json(rank) for rank in ranks]}}]}


def refused(match: str, *servers, settings=SETTINGS, spec=SPEC, asked=ASKED):
    with pytest.raises(CapabilityError, match=match):
        prove({f"http://{n}": server for n, server in enumerate(servers)}, asked, settings, spec)


def test_engines_that_prove_everything():
    second = replace(GOOD, rank=1, resident_digest="r1", draft_digest="d1")
    proof = prove({"http://0": info(GOOD, second), "http://1": info(GOOD, second)}, ASKED, SETTINGS, SPEC)
    assert proof == Proof(32, {0: "d", 1: "d1"})


def test_no_engine_and_no_report():
    refused("the router knows no engine")
    refused("http://0 reports no capability: the plugin is not loaded", {"internal_states": [{}]})
    refused("http://1 reports no capability", info(GOOD), {})
    bad = info(GOOD)
    bad["internal_states"][0]["sc"]["ranks"][0].pop("verifier")
    refused("in another form .*verifier", bad)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"dflash_sampling_verify_available": False}, "greedy fallback"),
        ({"accept_threshold_single": 0.9}, "accept_threshold_single is 0.9"),
        ({"filter_orders": ("joint",)}, "filter order 'top_k_first' is not among"),
        ({"arm": "dflash", "verifier": "target_only"}, "loaded arm is 'dflash', wanted 'dflash2'"),
        ({"verifier_impl": "test"}, "verifier implementation is 'test'"),
        ({"patches": FILTERED_PATCHES}, "target_only_weights is not in force"),
        ({"patches": frozenset({"target_only_weights"})}, "patches not in force"),
    ],
)
def test_one_rank_that_falls_short(change, match):
    refused(match, info(GOOD, replace(GOOD, rank=1, **change)))


@pytest.mark.parametrize(
    ("served", "match"),
    [
        ({"speculative_num_draft_tokens": 16}, "--sglang-speculative-num-draft-tokens 8 was asked for, served is 16"),
        ({"speculative_algorithm": None}, "--sglang-speculative-algorithm 'DFLASH' was asked for, served is None"),
    ],
)
def test_a_server_that_runs_with_something_else(served, match):
    refused(match, info(GOOD, **served))


def test_an_argument_that_the_server_does_not_know():
    """Miles drops it with a log line."""
    without = info(GOOD)
    del without["speculative_num_draft_tokens"]
    refused("8 was asked for, served is unknown to it", without)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"weight_version": 4}, r"weight versions \[3, 4\]"),
        ({"vocab_size": 64}, r"vocabularies of \[32, 64\]"),
        ({"resident_digest": "x"}, "rank 0 of the engines differs in resident_digest"),
        ({"draft_digest": "x"}, "rank 0 of the engines differs in draft_digest"),
    ],
)
def test_engines_that_disagree(change, match):
    refused(match, info(GOOD), info(replace(GOOD, **change)))


def test_a_draft_that_changed():
    before = Proof(32, {0: "d"})
    require_same_draft(None, before)
    require_same_draft(before, Proof(32, {0: "d"}))
    with pytest.raises(CapabilityError, match="the private draft changed"):
        require_same_draft(before, Proof(32, {0: "e"}))
