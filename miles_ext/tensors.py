"""Torch tensors as the contract sees them: entries for manifests and arrays for the object store."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from miles_ext.errors import WeightError
from miles_ext.weights import TensorEntry, combine, tensor_digest

_CARRIER = {torch.bfloat16: torch.uint16}  # numpy has no bfloat16: its bits travel as uint16


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def to_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Contiguous host array of the tensor's bytes, same shape; bfloat16 as uint16. No copy for a host tensor."""
    tensor = tensor.detach().contiguous().cpu()
    return tensor.view(_CARRIER.get(tensor.dtype, tensor.dtype)).numpy()


def from_array(array: NDArray[Any], dtype: str, *, lend: bool = False) -> torch.Tensor:
    """Inverse of `to_array`; `dtype` is the manifest's spelling. A read-only array (object store) is copied, unless
    `lend`: then the tensor lies on the array's own bytes and must not be written."""
    wanted = getattr(torch, dtype, None)
    if not isinstance(wanted, torch.dtype):
        raise WeightError(f"dtype {dtype!r} is unknown; accepted: a torch dtype name such as float32")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        tensor = torch.from_numpy(array if lend or array.flags.writeable else np.array(array))
    return tensor.view(wanted) if wanted in _CARRIER else tensor


def entry(tensor: torch.Tensor) -> TensorEntry:
    """Shape, dtype and digest of the tensor's bytes (moved to the host where needed)."""
    return TensorEntry(tuple(tensor.shape), dtype_name(tensor.dtype), tensor_digest(to_array(tensor)))


def entries(tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> dict[str, TensorEntry]:
    named = cast(Iterable[tuple[str, torch.Tensor]], tensors.items() if isinstance(tensors, Mapping) else tensors)
    return {name: entry(tensor) for name, tensor in named}


def digest(tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> str:
    """One digest over names, shapes, dtypes and contents; empty for no tensors."""
    found = entries(tensors)
    return combine(found) if found else ""
