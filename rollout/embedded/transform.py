"""Declared changes of handed-over weights: what makes the rollout policy another than the trainer's, on purpose.

They imitate what production does to a rollout copy (quantised weights, another arithmetic) so that its effect can be
studied. The recorded law stays the law of the rollouts: it is made from the weights as they are changed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from miles_ext.errors import WeightError

LEVELS = {"int8": 127, "int4": 7}  # symmetric: -n to n
INT4_GROUP = 32  # inputs that share an int4 scale; int8 has one scale a row
ACCEPTED = f"quantise one of {', '.join(LEVELS)}; noise, a number > 0, beside seed, an integer"


def check(transform: Mapping[str, Any]) -> None:
    """Raise WeightError unless the engine knows how to apply all of `transform`."""
    noise = transform.get("noise", 1.0)
    known = {"quantise", "noise"} | ({"seed"} if "noise" in transform else set())
    fits = transform.keys() <= known and transform.get("quantise", "int8") in LEVELS
    whole = "noise" not in transform or isinstance(transform.get("seed"), int)
    if not (fits and whole and isinstance(noise, (int, float)) and 0 < noise < float("inf")):
        raise WeightError(f"manifest declares the transform {dict(transform)}; accepted: {ACCEPTED}")


def apply(tensors: Mapping[str, torch.Tensor], transform: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors (HF names) as `transform` says, in their own dtypes; nothing is changed in place.

    Matrices of the layers alone: embedding, head and norms stay, as weight-only quantisation leaves them. noise:
    standard deviation in units of a matrix's root mean square; the draw depends on (seed, name) and so is the same at
    every handoff and in every replica. Noise comes before quantisation.
    """
    return {
        name: _changed(name, tensor, transform) if tensor.ndim == 2 and ".layers." in name else tensor
        for name, tensor in tensors.items()
    }


def _changed(name: str, tensor: torch.Tensor, transform: Mapping[str, Any]) -> torch.Tensor:
    values = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    if "noise" in transform:
        values = add_noise(values, transform["noise"] * values.square().mean().sqrt(), f"{transform['seed']}\0{name}")
    if "quantise" in transform:
        values = quantise(values, transform["quantise"])
    return values.to(tensor.dtype)


def add_noise(values: torch.Tensor, scale: torch.Tensor | float, key: str) -> torch.Tensor:
    """values + scale * N(0, 1), the draws a function of `key` and the shape, whatever the device."""
    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(key.encode()) >> 1)
    return values + scale * torch.randn(values.shape, generator=generator).to(values)


def quantise(values: torch.Tensor, kind: str) -> torch.Tensor:
    """Rounded to `kind` and back, [rows, inputs]: the largest magnitude of a row (int8) or of a row's group (int4) is
    the last level, and ties go to even."""
    rows, inputs = values.shape
    group = INT4_GROUP if kind == "int4" and inputs % INT4_GROUP == 0 else inputs
    grouped = values.reshape(rows, -1, group)
    step = grouped.abs().amax(-1, keepdim=True) / LEVELS[kind]
    return torch.where(step > 0, (grouped / step).round() * step, grouped).reshape(rows, inputs)
