"""The adapter and the real server together: what an engine promises, with the server's process, wire and weights."""

from collections.abc import Iterator

import numpy as np
import psutil
import pytest
from safetensors.torch import load_file

from miles_ext.capability import ArmKind, require
from miles_ext.errors import CapabilityError, RequestError, WeightError
from miles_ext.records import Commit, Completion, Status
from miles_ext.sampling import SamplingSpec
from miles_ext.tensors import entries, to_array
from miles_ext.weights import WeightManifest
from rollout.engine import Bucket, Request
from rollout.sglang_engine.engine import SglangEngine
from tests.sglang_cpu.answers import EOS, PROMPTS, VOCABULARY
from tests.sglang_cpu.server import TINY
from tests.sglang_cpu.settings import cpu_config

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(600)]
SPECS = {
    "filtered": SamplingSpec(temperature=0.7, top_k=32, top_p=0.95),
    "complete": SamplingSpec(),
    "head": SamplingSpec(capture="head", head_size=32),
    "off": SamplingSpec(capture="off"),
}


@pytest.fixture(scope="module", params=["regular", "dflash2"])
def arm(request: pytest.FixtureRequest) -> ArmKind:
    return request.param


@pytest.fixture(scope="module")
def engine(arm: ArmKind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    # One transport an arm: a cold start is dear, and the transports do not know arms.
    transport = "disk" if arm == "dflash2" else "tensor"
    folder = tmp_path_factory.mktemp(arm)
    one = SglangEngine(
        cpu_config(arm, transport=transport, folder=folder), arm, TINY / "target", TINY / "draft", f"{arm}-0"
    )
    processes = psutil.Process().children(recursive=True)
    assert len(processes) > 2  # the leash, the server, its scheduler
    try:
        yield one
    finally:
        one.close()
    assert not [process for process in processes if process.is_running()]
    assert list(folder.iterdir()) == []


def ask(spec: SamplingSpec, *, max_new_tokens: int = 40, stop_strings: tuple[str, ...] = ()) -> list[Request]:
    return [
        Request(
            request_id=str(i), prompt_ids=np.array(prompt, np.int32), spec=spec, max_new_tokens=max_new_tokens,
            stop_ids=(EOS,), stop_strings=stop_strings,
        )
        for i, prompt in enumerate(PROMPTS)
    ]  # fmt: skip


def test_the_capability_is_required_and_a_stand_in_verifier_is_refused(engine: SglangEngine, arm: ArmKind) -> None:
    (report,) = engine.capability()
    assert (report.engine, report.engine_id, report.weight_version) == ("sglang", f"{arm}-0", 0)
    require(report, SPECS["filtered"], arm, allow_test_verifier=True)
    if arm == "regular":
        require(report, SPECS["filtered"], arm)
    else:
        with pytest.raises(CapabilityError, match="verifier implementation is 'test'"):
            require(report, SPECS["filtered"], arm)
    assert engine.healthy()


@pytest.mark.parametrize("name", SPECS)
def test_completions_are_whole(engine: SglangEngine, arm: ArmKind, name: str) -> None:
    requests = ask(SPECS[name])
    completions = engine.generate(requests)
    for request, completion in zip(requests, completions, strict=True):
        completion.check(VOCABULARY)
        np.testing.assert_array_equal(completion.prompt_ids, request.prompt_ids)
        assert (completion.support is None) == (name == "off")
        assert completion.engine_id == f"{arm}-0" and (completion.draft_digest == "") == (arm == "regular")
        assert completion.commit[0] == Commit.PREFILL and set(completion.weight_version) == {0}
        assert completion.spec.live_steps > 0
        if completion.finish_reason == "stop":
            assert completion.response_ids[-1] == EOS
        else:
            assert len(completion) == 40
    if arm == "dflash2":
        assert sum(completion.spec.accepted for completion in completions) > 0


def test_a_stop_string_is_in_the_ids_and_not_in_the_text(engine: SglangEngine) -> None:
    (stopped, *_) = engine.generate(ask(SPECS["filtered"], stop_strings=("=", "+"))[:1])
    assert stopped.finish_reason == "stop"
    assert not set("=+") & set(stopped.text)
    assert stopped.support is not None and len(stopped.support) == len(stopped.response_ids)


def test_an_overflow_comes_back_as_an_abort_with_its_rows(engine: SglangEngine) -> None:
    (cut, *_) = engine.generate(ask(SamplingSpec(temperature=2.0, top_p=0.999, max_support=2))[:1])
    assert (cut.finish_reason, cut.worst_status) == ("abort", Status.OVERFLOW)


def test_what_cannot_be_honoured_is_refused_before_anything_is_sampled(engine: SglangEngine) -> None:
    for spec, words in (
        (SamplingSpec(top_k=4, filter_order="joint"), "rollout.sglang.filter_order"),
        (SamplingSpec(top_k=4, max_support=5000), "rollout.sglang.max_support"),
    ):
        with pytest.raises(RequestError, match=words):
            engine.generate(ask(spec))
    assert engine.healthy()


def changed(by: float) -> tuple[dict[str, np.ndarray], WeightManifest]:
    tensors = {name: tensor + by for name, tensor in load_file(TINY / "target" / "model.safetensors").items()}
    manifest = WeightManifest(version=0, tensors=entries(tensors))
    return {name: to_array(tensor) for name, tensor in tensors.items()}, manifest


def in_two(arrays: dict[str, np.ndarray]) -> list[Bucket]:
    names = sorted(arrays)
    return [{name: arrays[name] for name in names[::2]}, {name: arrays[name] for name in names[1::2]}]


def accept_length(completions: list[Completion]) -> float:
    return sum(map(len, completions)) / sum(completion.spec.live_steps for completion in completions)


def test_handoffs_reach_the_target_alone_and_come_back_whole(engine: SglangEngine, arm: ArmKind) -> None:
    (before,) = engine.capability()
    arrays, manifest = changed(0.02)
    one = engine.update_weights(WeightManifest(version=1, tensors=manifest.tensors), in_two(arrays))
    assert one.received_digest == manifest.digest and one.draft_digest == before.draft_digest
    assert one.resident_digest != before.resident_digest
    assert {version for c in engine.generate(ask(SPECS["filtered"])) for version in c.weight_version} == {1}

    with pytest.raises(WeightError, match="does not rise above 1"):
        engine.update_weights(WeightManifest(version=1, tensors=manifest.tensors), in_two(arrays))
    broken = {name: array.copy() for name, array in arrays.items()}
    broken["model.norm.weight"][0] ^= 1
    with pytest.raises(WeightError, match="model.norm.weight"):
        engine.update_weights(WeightManifest(version=2, tensors=manifest.tensors), in_two(broken))
    (still,) = engine.capability()
    assert (still.weight_version, still.resident_digest) == (1, one.resident_digest)

    arrays, manifest = changed(0.0)
    two = engine.update_weights(WeightManifest(version=2, tensors=manifest.tensors), in_two(arrays))
    assert (two.resident_digest, two.draft_digest) == (before.resident_digest, before.draft_digest)
    completions = engine.generate(ask(SPECS["filtered"]))
    assert {version for c in completions for version in c.weight_version} == {2}
    if arm == "dflash2":
        assert accept_length(completions) > 1.5
