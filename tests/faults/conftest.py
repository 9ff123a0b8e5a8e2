"""The small target and draft that a module's runs share."""

import pytest
import torch

from tests.rollout.tiny import write_draft, write_target


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    torch.set_num_threads(1)
    target = write_target(tmp_path_factory.mktemp("target"))
    return {"target": target, "draft": write_draft(tmp_path_factory.mktemp("draft"), target)}
