"""Tests of this folder need sglang's CUDA build and a GPU, and are not collected elsewhere.

On such a host: python -m pytest --confcutdir=tests/sglang_cuda tests/sglang_cuda
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

collect_ignore_glob = [] if find_spec("sglang") and torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture(scope="session")
def plugin() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
