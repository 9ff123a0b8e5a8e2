"""megatron-core without a GPU: while `on_host` is entered, what it asks of CUDA is done on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def on_host() -> Iterator[None]:
    """For a worker process that sees no GPU; everything is as it was once left. RuntimeError where there is a GPU."""
    if torch.cuda.is_available():
        raise RuntimeError("megatron-core on the CPU in a process that sees a GPU; hide it (CUDA_VISIBLE_DEVICES=)")
    found = torch.cuda.current_device, torch.cuda.synchronize
    torch.cuda.current_device, torch.cuda.synchronize = _host, _nothing
    try:
        with _OnHost():
            yield
    finally:
        torch.cuda.current_device, torch.cuda.synchronize = found


class _OnHost(TorchFunctionMode):
    """Devices spelt out as 'cuda', and parameters told apart by the name of their CUDA type."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") == "cuda":
            kwargs = {**kwargs, "device": "cpu"}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def _host() -> torch.device:
    return torch.device("cpu")


def _nothing(*_: Any) -> None:
    """There is no stream to wait for."""
