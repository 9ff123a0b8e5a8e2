import pytest
import torch

from tests.trainer.rollouts import make_model, make_rollout


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="session")
def rollout(target):
    """On-policy, unfiltered, complete: 4 groups of 2."""
    return make_rollout(target)
