"""The law of each slot of a step, from the sampling specs of the requests that share the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles_ext.law import law
from miles_ext.sampling import SamplingSpec


class BatchLaw:
    """Per-request temperature, top_k, top_p and filter order, applied to the logits of any subset of requests."""

    def __init__(self, specs: Sequence[SamplingSpec]) -> None:
        self.temperature = np.array([spec.temperature for spec in specs])
        self.top_k = np.array([spec.top_k for spec in specs], np.int64)
        self.top_p = np.array([spec.top_p for spec in specs])
        self.joint = np.array([spec.is_filtered and spec.filter_order == "joint" for spec in specs])
        self._shared = len({(s.temperature, s.top_k, s.top_p, s.filter_order) for s in specs}) == 1

    def __call__(self, logits: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """Laws [B, n, V] of logits [B, n, V] whose row b belongs to request rows[b]."""
        flat = logits.view(-1, logits.shape[-1])
        if self._shared:
            order = "joint" if self.joint[0] else "top_k_first"
            return law(flat, self.temperature[0], self.top_k[0], self.top_p[0], order).view(logits.shape)
        owner = np.repeat(rows, logits.shape[1])
        joint = self.joint[owner]
        if joint.all() or not joint.any():
            return self._part(flat, owner).view(logits.shape)
        parts = [np.flatnonzero(joint), np.flatnonzero(~joint)]
        back = torch.from_numpy(np.argsort(np.concatenate(parts))).to(flat.device)
        laws = [self._part(flat[torch.from_numpy(part).to(flat.device)], owner[part]) for part in parts]
        return torch.cat(laws)[back].view(logits.shape)

    def _part(self, flat: Tensor, owner: NDArray[np.int64]) -> Tensor:
        order = "joint" if self.joint[owner[0]] else "top_k_first"
        return law(flat, self.temperature[owner], self.top_k[owner], self.top_p[owner], order)
