"""Tests that need a GPU. Without one they are not collected at all: run `python -m pytest tests/cuda` on a GPU host."""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
