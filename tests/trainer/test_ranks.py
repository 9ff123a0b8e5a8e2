import socket

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.multiprocessing.spawn import spawn

from tests.trainer import ranks
from tests.trainer.rollouts import make_rollout
from trainer.worker import TrainerWorker


def free_ports(count):
    """First of `count` ports in a row that are free now."""
    while True:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            first = found.getsockname()[1]
        sockets = [socket.socket() for _ in range(count)]
        try:
            for offset, opened in enumerate(sockets):
                opened.bind(("127.0.0.1", first + offset))
            return first
        except (OSError, OverflowError):
            continue
        finally:
            for opened in sockets:
                opened.close()


@pytest.fixture(scope="module")
def rollouts(target):
    uneven = make_rollout(target, groups=5, samples=3, noise=0.3, seed=8, masked=True)
    lonely = make_rollout(target, groups=4, samples=1, noise=0.3, seed=9)
    return {"float64": uneven, "lonely": lonely, "bfloat16": uneven}


@pytest.fixture(scope="module")
def two(target, rollouts, tmp_path_factory):
    """Outcomes of two ranks by configuration, and the folder they were written to."""
    folder = tmp_path_factory.mktemp("two")
    arguments = (free_ports(len(ranks.CONFIGS)), target, rollouts, folder)
    spawn(ranks.main, arguments, nprocs=2)
    return folder, {
        name: [torch.load(folder / name / f"rank{rank}.pt") for rank in range(2)] for name in ranks.CONFIGS
    }


@pytest.fixture(scope="module")
def one(target, rollouts, tmp_path_factory):
    found = {}
    for name in ("float64", "lonely"):
        folder = tmp_path_factory.mktemp("one")
        worker = TrainerWorker(ranks.CONFIGS[name].model_copy(update={"workers": 1}), target, 0)
        ranks.outcome(name, worker, rollouts[name], folder)
        found[name] = torch.load(folder / "rank0.pt"), folder
    return found


@pytest.mark.parametrize("name", ["float64", "lonely"])
def test_two_ranks_train_as_one(one, two, name):
    alone, (first, second) = one[name][0], two[1][name]
    assert not second["weights"] and second["digest"] == ""
    for mine, theirs, other in zip(alone["metrics"], first["metrics"], second["metrics"], strict=True):
        assert theirs == other and theirs.keys() == mine.keys()
        for key in mine.keys() - {"perf/train_rss_mb"}:
            assert np.isclose(mine[key], theirs[key], rtol=1e-7, atol=1e-9), key
    assert alone["weights"].keys() == first["weights"].keys()
    for key, tensor in alone["weights"].items():
        assert torch.allclose(tensor, first["weights"][key], rtol=0, atol=1e-9), key


def test_bfloat16_keeps_float32_master_weights(two, one):
    first = two[1]["bfloat16"][0]
    moved = 0.0
    for key, tensor in one["float64"][0]["weights"].items():
        assert torch.allclose(tensor, first["weights"][key], atol=0.02), key
        moved += (first["weights"][key] != first["weights"][key].bfloat16().double()).double().mean().item()
    assert moved > 1
    assert all(np.isfinite(value) for metrics in first["metrics"] for value in metrics.values())


def test_a_checkpoint_of_two_ranks_loads_on_one(target, two, rollouts):
    folder, outcomes = two
    worker = TrainerWorker(ranks.CONFIGS["float64"].model_copy(update={"workers": 1}), target, 1)
    assert worker.load(folder / "float64" / "checkpoints" / "last") == ranks.STEPS
    _, buckets = worker.export(ranks.STEPS, "float64")
    saved = outcomes["float64"][0]["weights"]
    assert all(np.array_equal(array, saved[key].numpy()) for bucket in buckets for key, array in bucket.items())
    assert worker.backend.updates == 2 * ranks.STEPS


def test_the_probe_of_two_ranks_names_the_same_tokens_and_gradients(one, two):
    def columns(folder):
        with safe_open(folder / "audit" / "probe.safetensors", "numpy") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}

    alone, shared = columns(one["float64"][1]), columns(two[0] / "float64")
    known = {key: place for place, key in enumerate(zip(alone["trajectory"], alone["token"], strict=True))}
    places = [known[key] for key in zip(shared["trajectory"], shared["token"], strict=True)]
    assert 0 < len(places) < len(known)
    for name in ("logit_grad", "advantage", "scale"):
        assert np.allclose(shared[name], alone[name][places], rtol=1e-5, atol=1e-9), name
