import numpy as np
import pytest
import ray

from miles_ext.tensors import entries, from_array
from tests.trainer.rollouts import make_model, make_rollout
from trainer.config import TrainerConfig
from trainer.worker import TrainerGroup, TrainerWorker


@pytest.mark.ray
@pytest.mark.megatron
def test_a_group_of_two_tensor_ranks_trains_like_a_torch_worker(ray_cluster, tmp_path):
    target = make_model(tmp_path / "model", num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    rollout = make_rollout(target, noise=0.3)
    config = TrainerConfig(backend="megatron", workers=2, tp=2, lr=1e-3, eps=1e-3)
    group = TrainerGroup(config, target, 0)
    alone = TrainerWorker(TrainerConfig(lr=1e-3, eps=1e-3), target, 0)
    found = group.train(ray.put(rollout), temperature=1.0)
    expected = alone.train(rollout, temperature=1.0)
    assert 100 < found.pop("perf/train_rss_mb") < 2000
    expected.pop("perf/train_rss_mb")
    assert found.keys() == expected.keys()
    assert all(np.isclose(found[name], expected[name], rtol=1e-4, atol=1e-5) for name in expected)

    manifest, shared = group.share(1, "float32")
    received = {name: from_array(array, "float32") for bucket in ray.get(shared) for name, array in bucket.items()}
    manifest.require_received(entries(received))
    _, buckets = alone.export(1, "float32")
    weights = {name: array for bucket in buckets for name, array in bucket.items()}
    assert received.keys() == weights.keys()
    assert all(np.allclose(received[name].numpy(), weights[name], rtol=0, atol=1e-6) for name in weights)

    group.save(tmp_path / "step-1")
    after = group.train(rollout, temperature=1.0)
    assert group.load(tmp_path / "step-1") == 1
    again = group.train(rollout, temperature=1.0)
    del after["perf/train_rss_mb"], again["perf/train_rss_mb"]
    assert after == again
    group.close()
