import time

import numpy as np
import pytest
import ray

from miles_ext.errors import SupportError
from miles_ext.records import Status
from miles_ext.tensors import entries, from_array
from tests.trainer.test_batch import with_status
from trainer.config import TrainerConfig
from trainer.worker import TrainerGroup, TrainerWorker


@pytest.mark.ray
def test_a_group_of_actors_trains_like_a_worker_in_this_process(ray_cluster, target, rollout, tmp_path):
    config = TrainerConfig(lr=1e-3)
    group, alone = TrainerGroup(config, target, 0), TrainerWorker(config, target, 0)
    assert ray.available_resources().get("CPU", 0) == 1
    found = group.train(ray.put(rollout), temperature=1.0)
    expected = alone.train(rollout, temperature=1.0)
    assert 100 < found.pop("perf/train_rss_mb") < 1000
    expected.pop("perf/train_rss_mb")
    assert found == expected
    manifest, shared = group.share(1, "bfloat16")
    assert manifest.digest == alone.export(1, "bfloat16")[0].digest
    buckets = ray.get(shared)
    manifest.require_received(
        entries({name: from_array(array, "bfloat16") for bucket in buckets for name, array in bucket.items()})
    )

    group.save(tmp_path / "step-1")
    assert alone.load(tmp_path / "step-1") == 1
    group.save_hf(tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors").stat().st_size > 1000

    bad = [with_status(rollout[0], 0, Status.OVERFLOW), *rollout[1:]]
    with pytest.raises(SupportError, match="^trajectory 0 of prompt 0: support row 0 is OVERFLOW"):
        group.train(bad, temperature=1.0)
    assert np.isfinite(group.train(rollout, temperature=1.0)["train/loss"])
    group.close()


@pytest.mark.ray
def test_a_model_that_cannot_be_loaded_is_named_and_leaves_nothing_behind(ray_cluster, tmp_path):
    with pytest.raises(ValueError, match=f"^{tmp_path} is no Hugging Face folder"):
        TrainerGroup(TrainerConfig(cpus_per_worker=2), tmp_path, 0)
    for _ in range(100):  # Ray frees resources a moment after the call
        if ray.available_resources().get("CPU", 0) == 2:
            return
        time.sleep(0.1)
    raise AssertionError(f"resources are still taken: {ray.available_resources()}")
