"""What the plugin refuses at admission, and what it lets through."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from miles_ext.sglang_plugin import guard
from miles_ext.sglang_plugin.admission import refusal
from miles_ext.sglang_plugin.settings import ORDER_VARIABLE, STRICT_VARIABLE, read_settings
from miles_ext.sglang_plugin.worker import WorkerFacts
from tests.sglang_cpu.stand_ins import request

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("plugin")]
FACTS = WorkerFacts(
    arm="dflash", verifier="target_only", verifier_impl="production", sampling_verify_available=True,
    accept_threshold_single=1.0, accept_threshold_acc=1.0, filter_order="top_k_first", max_support=4096, vocab_size=512,
    blockers=(),
)  # fmt: skip


@pytest.mark.parametrize(
    "accepted",
    [
        request(), request(top_k=8, top_p=0.9), request(top_p=0.9), request(capture="head", k=32),
        request(capture="off", k=1), request(capture="none", top_k=8),
    ],
)  # fmt: skip
def test_admitted(accepted: Any) -> None:
    assert refusal(accepted, FACTS) == ""


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (request(min_p=0.1), "min_p is 0.1"),
        (request(capture="none", min_p=0.1), "min_p is 0.1"),
        (request(order="joint"), "filter order is 'joint'"),
        (request(capture="some"), "capture is 'some'"),
        (request(capture="head", k=32, top_k=8), "a head of the unfiltered law beside top_k=8"),
        (request(capture="head", k=32, top_p=0.5), "a head of the unfiltered law"),
        (request(capture="head", k=513), "exceeds the vocabulary of 512"),
        (request(k=0, top_k=4), "k is 0"),
        (request(k=5000, top_k=4), "--sampling-mask-max-tokens is 4096"),
        (request(k=511), "needs k >= 512"),
    ],
)
def test_refused(bad: Any, words: str) -> None:
    assert words in refusal(bad, FACTS)


def test_a_request_of_another_wire_version_is_refused() -> None:
    bad = request()
    bad.sampling_params.custom_params["sc"]["v"] = 2
    assert "v = 1" in refusal(bad, FACTS)
    bad.sampling_params.custom_params["sc"] = "yes"
    assert "v = 1" in refusal(bad, FACTS)


def test_streaming_is_refused() -> None:
    bad = request()
    bad.stream = True
    assert "stream" in refusal(bad, FACTS)


def test_a_greedy_fallback_refuses_sampled_requests_and_only_those(monkeypatch: pytest.MonkeyPatch) -> None:
    greedy_only = replace(FACTS, sampling_verify_available=False)
    plain = request(capture="none", top_k=8)
    assert "verified greedily" in refusal(plain, greedy_only)
    assert "verified greedily" in refusal(request(), greedy_only)
    assert refusal(request(capture="none", top_k=1), greedy_only) == ""
    monkeypatch.setenv(STRICT_VARIABLE, "0")
    assert refusal(plain, greedy_only) == ""
    assert "verified greedily" in refusal(request(), greedy_only)  # capture needs the law, strict or not


def test_a_blocker_is_named() -> None:
    assert "SGLANG_SIMULATE_ACC_LEN" in refusal(request(), replace(FACTS, blockers=("SGLANG_SIMULATE_ACC_LEN",)))


def test_capture_is_refused_where_a_patch_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(guard._complaints, "one_law", ["some.function: source digest is other"])
    assert "some.function" in refusal(request(), FACTS)
    assert refusal(request(capture="none"), FACTS) == ""


@pytest.mark.parametrize("variable", [ORDER_VARIABLE, STRICT_VARIABLE])
def test_a_setting_that_holds_nonsense_names_itself(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "perhaps")
    with pytest.raises(ValueError, match=f"{variable} is 'perhaps'; accepted"):
        read_settings()


def test_thresholds_stay_at_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.scheduler_components.internal_state import (
        SchedulerInternalStateController,
        UpdateRejected,
    )

    scheduler = SimpleNamespace(spec_algorithm=SimpleNamespace(is_dflash=lambda: False))
    controller = SimpleNamespace(scheduler=scheduler)
    validate: Any = SchedulerInternalStateController._validate_accept_threshold
    validate(controller, "speculative_accept_threshold_acc", 1.0)
    with pytest.raises(UpdateRejected, match="loosens acceptance"):
        validate(controller, "speculative_accept_threshold_acc", 0.9)
    monkeypatch.setenv(STRICT_VARIABLE, "0")
    validate(controller, "speculative_accept_threshold_acc", 0.9)
