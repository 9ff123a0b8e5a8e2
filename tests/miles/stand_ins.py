"""Lets Miles' modules be imported without the packages that their GPU side needs and the tests never call.

A module below one of `ABSENT` that cannot be found is an empty shell: every attribute of it is a class without
behaviour. Megatron-core, Ray, torch, transformers, httpx and the like are the real ones.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

ABSENT = {
    "sglang", "torch_memory_saver", "pybase64", "pandas", "openai", "IPython", "pylatexenc",
    "partial_json_parser", "zmq", "sglang_router", "tqdm", "omegaconf", "mbridge",
    "mooncake", "polars", "memray", "torchft", "typer", "setproctitle", "blobfile", "mlflow", "datasets",
    "megatron.training",
}  # fmt: skip


class Shell(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = type(name, (), {"__module__": self.__name__})
        setattr(self, name, found)
        return found


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked last, so that what is installed comes first."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        parts = fullname.split(".")
        if not any(".".join(parts[:n]) in ABSENT for n in (1, 2)):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return Shell(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install(source: str) -> Finder:
    finder = Finder()
    sys.meta_path.append(finder)
    sys.path.insert(0, source)
    sys.modules["miles.utils.fp8_kernel"] = Shell("miles.utils.fp8_kernel")  # Triton, which torch must not find
    return finder
