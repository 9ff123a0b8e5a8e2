import subprocess
import sys

import numpy as np
import pytest

from miles_ext.errors import CheckpointError, EngineError, RequestError
from rollout.config import RolloutConfig
from rollout.embedded.engine import EmbeddedEngine
from rollout.worker import RolloutWorker
from tests.rollout.tiny import requests

CONFIG = RolloutConfig(context_length=64, max_concurrency=8)


def test_a_worker_serves_what_its_engine_serves(target, draft):
    worker = RolloutWorker(CONFIG, "dflash2", target, draft, "worker-0")
    with pytest.raises(EngineError, match="worker-0 was asked to serve before it was started"):
        worker.generate(requests(1))
    (capability,) = worker.start()
    assert (capability.arm, capability.engine_id, worker.healthy()) == ("dflash2", "worker-0", True)
    engine = EmbeddedEngine(target, draft, "dflash2", context_length=64, max_concurrency=8)
    for found, expected in zip(worker.generate(requests(5)), engine.generate(requests(5)), strict=True):
        np.testing.assert_array_equal(found.response_ids, expected.response_ids)
        assert found.engine_id == "worker-0"
    with pytest.raises(RequestError, match="max_new_tokens is 0"):
        worker.generate(requests(1, max_new_tokens=0))


def test_an_engine_that_breaks_is_no_fault_of_the_request(target):
    worker = RolloutWorker(CONFIG, "regular", target, None, "worker-3")
    worker.start()
    engine = worker.engine
    assert isinstance(engine, EmbeddedEngine)
    engine.target.embedding = engine.target.embedding[:, :-1]  # torch then raises as it does for a device that fails
    with pytest.raises(EngineError, match="worker-3"):
        worker.generate(requests(1))


def test_a_draft_is_needed_where_the_arm_drafts(target):
    with pytest.raises(CheckpointError, match="needs a draft"):
        RolloutWorker(CONFIG, "dflash", target, None, "worker-0").start()


def test_a_rollout_process_carries_neither_transformers_nor_the_trainer():
    code = "import sys, rollout.worker, rollout.embedded.engine; print([m for m in sys.modules if '.' not in m])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "torch" in loaded
    assert not {"'transformers'", "'trainer'", "'experiments'", "'wandb'"} & set(loaded.strip("[]\n").split(", "))
