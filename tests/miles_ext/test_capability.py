from dataclasses import replace

import pytest

from miles_ext.capability import FILTERED_PATCHES, UNFILTERED_PATCHES, EngineCapability, require
from miles_ext.errors import CapabilityError
from miles_ext.sampling import SamplingSpec

FILTERED = SamplingSpec(top_k=8, top_p=0.9, max_support=64)
GOOD = EngineCapability(
    engine="embedded", engine_version="1", arm="dflash2", verifier="chain", dflash_sampling_verify_available=True,
    filter_orders=("top_k_first", "joint"), max_support=64, patches=FILTERED_PATCHES, vocab_size=32, draft_digest="d",
)  # fmt: skip


def test_an_engine_that_proves_everything_passes():
    require(GOOD, FILTERED, "dflash2")
    require(replace(GOOD, arm="dflash", verifier="target_only"), FILTERED, "dflash")
    regular = EngineCapability(
        engine="embedded", engine_version="1", arm="regular", verifier="none", filter_orders=("top_k_first",),
        max_support=64, patches=FILTERED_PATCHES, vocab_size=32,
    )  # fmt: skip
    require(regular, FILTERED, "regular")
    require(replace(GOOD, verifier_impl="test"), FILTERED, "dflash2", allow_test_verifier=True)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"arm": "dflash"}, "loaded arm is 'dflash'"),
        ({"verifier": "target_only"}, "verifier is 'target_only'"),
        ({"dflash_sampling_verify_available": False}, "greedy fallback"),
        ({"draft_digest": ""}, "no digest of the private draft"),
        ({"verifier_impl": "test"}, "verifier implementation is 'test'"),
        ({"accept_threshold_single": 0.9}, "accept_threshold_single is 0.9"),
        ({"accept_threshold_acc": 1.1}, "accept_threshold_acc is 1.1"),
        ({"environment": ("SIMULATE_ACC_LEN",)}, "SIMULATE_ACC_LEN"),
        ({"patches": FILTERED_PATCHES - {"cutoff_ties"}}, "patches not in force: ['cutoff_ties']"),
        ({"patches": frozenset()}, "strict_refusal"),
        ({"filter_orders": ("joint",)}, "filter order 'top_k_first' is not among ['joint']"),
        ({"max_support": 63}, "max_support 64 exceeds the engine's 63"),
    ],
)
def test_each_missing_proof_is_named(change, complaint):
    with pytest.raises(CapabilityError) as caught:
        require(replace(GOOD, **change), FILTERED, "dflash2")
    assert complaint in str(caught.value)


def test_everything_wrong_is_listed_at_once():
    bad = replace(GOOD, verifier="none", draft_digest="", accept_threshold_acc=0.5, engine_id="e7", rank=3)
    with pytest.raises(CapabilityError, match=r"engine e7 rank 3 .*verifier is .*; no digest .*; accept_threshold_acc"):
        require(bad, FILTERED, "dflash2")


def test_absence_of_proof_is_failure():
    bare = EngineCapability(engine="x", engine_version="0", arm="dflash2", verifier="chain")
    with pytest.raises(CapabilityError, match="greedy fallback.*no digest.*patches not in force"):
        require(bare, FILTERED, "dflash2")


def test_unfiltered_capture_needs_the_strict_refusal_alone():
    plain = replace(GOOD, patches=UNFILTERED_PATCHES, filter_orders=())
    require(plain, SamplingSpec(max_support=64), "dflash2")
    require(plain, SamplingSpec(capture="head", head_size=32), "dflash2")
    with pytest.raises(CapabilityError, match="head_size 33 exceeds the vocabulary"):
        require(plain, SamplingSpec(capture="head", head_size=33), "dflash2")
    with pytest.raises(CapabilityError, match="head_size 32 exceeds the engine's 31"):
        require(replace(plain, max_support=31), SamplingSpec(capture="head", head_size=32), "dflash2")
    require(replace(plain, patches=frozenset()), SamplingSpec(capture="off"), "dflash2")


def test_unknown_arms_are_refused():
    with pytest.raises(CapabilityError, match="accepted: regular, dflash, dflash2"):
        require(GOOD, FILTERED, "eagle")  # pyright: ignore[reportArgumentType]
