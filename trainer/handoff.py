"""Weights on their way to the engines: buckets of host arrays in the engine's dtype, and the manifest of them."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray

from miles_ext.errors import WeightError
from miles_ext.tensors import entry, to_array
from miles_ext.weights import WeightManifest
from trainer.backends.base import Backend

Bucket = dict[str, NDArray[Any]]


def export(backend: Backend, version: int, dtype: str, bucket_mb: float = 256.0) -> tuple[WeightManifest, list[Bucket]]:
    """Manifest and buckets of every weight under its HF name, cast to `dtype` (a torch name such as `bfloat16`).

    A bucket holds at most bucket_mb * 2**20 bytes, or one tensor. The arrays are copies: training may go on.
    Collective; ranks other than 0 take part and get an empty manifest and no buckets.
    """
    wanted = getattr(torch, dtype, None)
    if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
        raise WeightError(f"export dtype is {dtype!r}; accepted: a torch name such as float32 or bfloat16")
    limit = bucket_mb * 2**20
    entries, buckets, room = {}, [], 0.0
    for name, tensor in backend.export_hf():
        if backend.rank != 0:
            continue
        tensor = tensor.to("cpu", wanted, copy=True)
        if not buckets or tensor.nbytes > room:
            buckets.append({})
            room = limit
        room -= tensor.nbytes
        entries[name], buckets[-1][name] = entry(tensor), to_array(tensor)
    return WeightManifest(version=version, tensors=entries), buckets
