import os
import signal
import threading
import time

import numpy as np
import pytest
import ray

from miles_ext.capability import ArmKind
from miles_ext.errors import CapabilityError, EngineError, RequestError, WeightError
from miles_ext.sampling import SamplingSpec
from miles_ext.tensors import entries, to_array
from miles_ext.weights import WeightManifest
from rollout.config import RolloutConfig
from rollout.embedded.decoder import Decoder
from rollout.embedded.engine import EmbeddedEngine
from rollout.pool import RolloutPool
from tests.rollout.tiny import requests

pytestmark = pytest.mark.ray
SETTINGS = {"workers": 2, "cpus_per_worker": 0.5, "context_length": 64, "max_concurrency": 8}


@pytest.fixture
def make_pool(ray_cluster, target, draft):
    made = []

    def make(arm: ArmKind = "dflash2", spec=SamplingSpec(), **settings):  # noqa: B008
        made.append(RolloutPool(RolloutConfig(**SETTINGS | settings), arm, target, draft, spec))
        return made[-1]

    yield make
    for pool in made:
        pool.close()
        pool.close()


def other_weights(target, version):
    """The target's weights, a little larger, as a handoff delivers them."""
    tensors = {name: tensor * 1.05 for name, tensor in Decoder.from_hf(target).named_hf_tensors()}
    manifest = WeightManifest(version=version, tensors=entries(tensors))
    return manifest, [ray.put({name: to_array(tensor)}) for name, tensor in tensors.items()]


def ids(completions):
    return [completion.response_ids.tolist() for completion in completions]


def pids(pool):
    return ray.get([member.actor.pid.remote() for member in pool._members])


def test_completions_come_back_in_order_and_as_one_engine_makes_them(make_pool, target, draft):
    pool = make_pool()
    assert {capability.engine_id for capability in pool.start()} == {"worker-0", "worker-1"}
    assert 0 < pool.rss_mb() < 1000
    engine = EmbeddedEngine(target, draft, "dflash2", context_length=64, max_concurrency=8)
    found, expected = pool.generate(requests(11)), engine.generate(requests(11))
    assert ids(found) == ids(expected)
    assert [completion.engine_id for completion in found] == ["worker-0"] * 6 + ["worker-1"] * 5
    for mine, wanted in zip(found, expected, strict=True):
        assert mine.support is not None and wanted.support is not None
        np.testing.assert_allclose(mine.support.logprobs, wanted.support.logprobs, atol=2e-5)
    with pytest.raises(RequestError, match="prompt is empty"):
        pool.generate([*requests(3)[1:], *empty_prompt()])
    assert pool.restarts == 0, "a refused request says nothing of the worker"


def empty_prompt():
    (request,) = requests(1)
    object.__setattr__(request, "prompt_ids", np.zeros(0, np.int32))
    return [request]


def test_a_worker_killed_in_the_middle_is_replaced_fed_and_its_requests_draw_the_same(make_pool, target):
    pool = make_pool()
    pool.start()
    manifest, buckets = other_weights(target, 1)
    reports = pool.update_weights(manifest, buckets)
    assert {report.received_digest for report in reports} == {manifest.digest}
    asked = requests(96, max_new_tokens=50)
    started = time.perf_counter()
    expected = pool.generate(asked)
    half = (time.perf_counter() - started) / 2

    victim = pids(pool)[1]
    killer = threading.Timer(half, os.kill, (victim, signal.SIGKILL))
    killer.start()
    found = pool.generate(asked)
    killer.join()
    assert pool.restarts == 1 and victim not in pids(pool)
    assert ids(found) == ids(expected)
    assert all((completion.weight_version == 1).all() for completion in found)
    assert {capability.weight_version for capability in pool.capability()} == {1}


def test_a_worker_that_hangs_is_replaced(make_pool):
    pool = make_pool(arm="regular", request_timeout_s=6.0)
    pool.start()
    expected = pool.generate(requests(4))
    os.kill(pids(pool)[0], signal.SIGSTOP)
    assert ids(pool.generate(requests(4))) == ids(expected)
    assert pool.restarts >= 1


def test_the_budget_of_restarts_ends_the_run(make_pool):
    pool = make_pool(arm="regular", max_restarts=0)
    pool.start()
    os.kill(pids(pool)[0], signal.SIGKILL)
    with pytest.raises(EngineError, match="rollout worker 0 failed 1 times.*rollout.max_restarts = 0"):
        pool.generate(requests(4))


def test_a_handoff_is_taken_by_all_or_by_none(make_pool, target):
    pool = make_pool()
    before = {capability.resident_digest for capability in pool.start()}
    manifest, buckets = other_weights(target, 1)
    with pytest.raises(WeightError, match="did not arrive whole"):
        pool.update_weights(manifest, buckets[1:])
    assert {capability.resident_digest for capability in pool.capability()} == before
    assert {capability.weight_version for capability in pool.capability()} == {0}

    os.kill(pids(pool)[0], signal.SIGKILL)
    reports = pool.update_weights(manifest, buckets)
    assert pool.restarts == 1 and {report.version for report in reports} == {1}
    after = {capability.resident_digest for capability in pool.capability()}
    assert after == {report.resident_digest for report in reports} and after != before
    with pytest.raises(WeightError, match="version 1 does not rise"):
        pool.update_weights(manifest, buckets)


def test_an_engine_that_cannot_prove_the_law_never_samples(make_pool):
    pool = make_pool(spec=SamplingSpec(max_support=8))
    with pytest.raises(CapabilityError, match="vocabulary <= max_support, got 48 > 8"):
        pool.start()


def test_a_draft_that_does_not_fit_is_named_at_the_start(ray_cluster, target, draft, tmp_path):
    for file in draft.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = (tmp_path / "config.json").read_text().replace('"vocab_size": 48', '"vocab_size": 50')
    (tmp_path / "config.json").write_text(config)
    pool = RolloutPool(RolloutConfig(**SETTINGS), "dflash2", target, tmp_path, SamplingSpec())
    with pytest.raises(ValueError, match="vocab_size 50 differs from the target's 48"):
        pool.start()
    pool.close()
