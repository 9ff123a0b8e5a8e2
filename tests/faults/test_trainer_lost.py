"""On real Ray: a trainer that dies, hangs or finds no room ends its arm with one clear error; the arm goes on later."""

import os
import signal
import threading
import time

import pytest
import ray
from ray.exceptions import ObjectStoreFullError

from experiments import cluster
from miles_ext.errors import TrainerLostError
from tests.faults import local
from tests.rollout.tiny import write_draft, write_target
from trainer import worker
from trainer.config import TrainerConfig
from trainer.worker import TrainerGroup

pytestmark = [pytest.mark.faults, pytest.mark.ray]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    target = write_target(tmp_path_factory.mktemp("target"))
    return {"target": target, "draft": write_draft(tmp_path_factory.mktemp("draft"), target)}


class Mortal(worker._Rank):
    """A rank that tells its process, and can be made to hang."""

    def call(self, method, *args, **kwargs):
        if method == "pid":
            return os.getpid()
        if method == "hang":
            time.sleep(600)
        return super().call(method, *args, **kwargs)


def test_a_killed_trainer_is_named_and_nothing_stays(ray_cluster, models, monkeypatch):
    monkeypatch.setattr(worker, "_Rank", Mortal)
    group = TrainerGroup(TrainerConfig(), models["target"], 0)
    (pid,) = group._all("pid")
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(TrainerLostError, match="a trainer rank died in hang: .*--resume auto"):
        group._all("hang")
    group.close()
    require_free()


def test_a_silent_trainer_is_not_waited_for(ray_cluster, models, monkeypatch):
    monkeypatch.setattr(worker, "_Rank", Mortal)
    group = TrainerGroup(TrainerConfig(), models["target"], 0)
    group._timeout_s = 0.5
    with pytest.raises(TrainerLostError, match=r"trainer ranks \[0\] did not finish hang within 0.5 s"):
        group._all("hang")
    group.close()
    require_free()


def test_a_placement_that_no_node_can_hold_is_refused_or_given_up(ray_cluster, models, tmp_path):
    with pytest.raises(TrainerLostError, match="no room for 1 trainer workers of {'CPU': 64.0} each within"):
        TrainerGroup(TrainerConfig(cpus_per_worker=64, timeout_s=1), models["target"], 0)
    require_free()
    config = local.settings(models, tmp_path, trainer={"cpus_per_worker": 1.5}, rollout={"cpus_per_worker": 0.5})
    cluster.require_room(config)
    nodes = [{"Alive": True, "Resources": {"CPU": 1.0}}, {"Alive": True, "Resources": {"CPU": 1.0}}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "nodes", lambda: nodes)
        with pytest.raises(ValueError, match="a trainer worker needs 1.5 CPU and 0 GPU on one node, and none of the 2"):
            cluster.require_room(config)


def test_a_full_object_store_ends_the_arm_and_it_goes_on_later(ray_cluster, models, tmp_path, monkeypatch):
    def full() -> None:
        raise ObjectStoreFullError("the object store is full")

    config = local.settings(models, tmp_path, steps=3, checkpoint={"every": 1}, rollout={"context_length": 48})
    with monkeypatch.context() as patch:
        patch.setattr(TrainerGroup, "train", local.at_call(1, full, TrainerGroup.train))
        folder, said = local.run(config)
    assert "FAILED: ObjectStoreFullError" in said[-1]
    _, said = local.run(config)
    assert said[0] == "arm dflash2-s5 goes on after step 1 of 3"
    assert local.evidence(folder) and local.prompts_trained(folder) == list(range(6))
    require_free()


def require_free() -> None:
    """All of Ray's CPUs are free again, a moment after the call."""
    for _ in range(300):
        if ray.available_resources().get("CPU", 0) == 2:
            return
        time.sleep(0.1)
    raise AssertionError(f"resources are still taken: {ray.available_resources()}")
