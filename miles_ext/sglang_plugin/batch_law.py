"""The law of a batch's rows under this server's filter order: what the sampler and both verifiers call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from numpy.typing import NDArray
from torch import Tensor

from miles_ext.law import law
from miles_ext.sglang_plugin.settings import read_settings

if TYPE_CHECKING:
    from jaxtyping import Float

CHUNK = 1 << 25  # logits at once: a nucleus over a large vocabulary takes several float64 copies of them


def batch_law(
    logits: Float[Tensor, "n v"], temperature: NDArray, top_k: NDArray, top_p: NDArray
) -> Float[Tensor, "n v"]:
    """`law` for any number of rows. temperature, top_k, top_p: host arrays [n]."""
    n, v = logits.shape
    order = read_settings().filter_order
    if n * v <= CHUNK:
        return law(logits, temperature, top_k, top_p, order)
    probs = torch.empty(n, v, dtype=torch.float32, device=logits.device)
    step = max(1, CHUNK // v)
    for first in range(0, n, step):
        rows = slice(first, first + step)
        probs[rows] = law(logits[rows], temperature[rows], top_k[rows], top_p[rows], order)
    return probs
