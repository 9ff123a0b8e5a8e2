"""The pool over attached servers: each worker has its own, and a stand-in verifier passes by the switch alone."""

from __future__ import annotations

import numpy as np
import pytest
import ray
from safetensors.torch import load_file

from miles_ext.errors import CapabilityError
from miles_ext.sampling import SamplingSpec
from miles_ext.tensors import entries, to_array
from miles_ext.weights import WeightManifest
from rollout.config import RolloutConfig
from rollout.pool import RolloutPool
from tests.rollout.served import TINY, request
from tests.rollout.updatable import Server, updatable

pytestmark = pytest.mark.ray


def pool_over(*servers: Server, allow_test_verifier: bool = False) -> RolloutPool:
    config = RolloutConfig.model_validate(
        {
            "engine": "sglang", "workers": len(servers), "cpus_per_worker": 0.5, "max_concurrency": 4,
            "sglang": {"urls": [server.url for server in servers], "allow_test_verifier": allow_test_verifier},
        }
    )  # fmt: skip
    return RolloutPool(config, "dflash2", TINY / "target", TINY / "draft", SamplingSpec())


def test_every_worker_has_a_server_of_its_own_and_all_get_the_weights(ray_cluster: None) -> None:
    tensors = {name: t.float() + 0.01 for name, t in load_file(TINY / "target" / "model.safetensors").items()}
    bucket = ray.put({name: to_array(tensor) for name, tensor in tensors.items()})
    with updatable() as one, updatable() as two:
        pool = pool_over(one, two)
        try:
            assert [report.engine_id for report in pool.start()] == ["worker-0", "worker-1"]
            completions = pool.generate([request(i) for i in range(4)])
            assert [c.engine_id for c in completions] == ["worker-0", "worker-0", "worker-1", "worker-1"]
            pool.update_weights(WeightManifest(version=1, tensors=entries(tensors)), [bucket])
            assert one.calls == two.calls == ["pause", "disk 1", "continue"]
            assert np.unique([c.weight_version[0] for c in pool.generate([request(0), request(1)])]) == [1]
        finally:
            pool.close()


def test_a_stand_in_verifier_is_refused_without_the_switch(ray_cluster: None) -> None:
    with updatable() as server:
        server.engine.verifier_impl = "test"
        for allowed in (False, True):
            pool = pool_over(server, allow_test_verifier=allowed)
            try:
                if allowed:
                    assert pool.start()[0].verifier_impl == "test"
                else:
                    with pytest.raises(CapabilityError, match="verifier implementation is 'test'"):
                        pool.start()
            finally:
                pool.close()
