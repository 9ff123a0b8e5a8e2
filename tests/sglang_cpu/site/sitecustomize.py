"""Runs in every Python process of the CPU tests: lets a torchvision made for CUDA be imported beside a CPU torch."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any


class _DefineMissingOperators(MetaPathFinder):
    """torchvision registers fake kernels for two operators that its CUDA build alone defines."""

    def __init__(self) -> None:
        self.library: Any = None

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> None:
        if fullname == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for name in ("nms", "qnms"):
                self.library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, _DefineMissingOperators())
