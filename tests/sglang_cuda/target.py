"""The tiny target in float64 by transformers, and its law by filters of its own: the rows are held to it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from miles_ext.records import SupportRows
from miles_ext.sampling import SamplingSpec
from tests.sglang_cpu.server import TINY


@cache
def model(device: str) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float64)
    return loaded.to(device)


@torch.no_grad()
def logits(prompts: list[list[int]], responses: list[list[int]], device: str) -> Tensor:
    """float64 [n, T, v], the logits each of the T response tokens was drawn from. Equal lengths."""
    ids = torch.tensor([prompt + response for prompt, response in zip(prompts, responses, strict=True)], device=device)
    return model(device)(ids).logits[:, len(prompts[0]) - 1 : -1].cpu()


def law(logits: Tensor, spec: SamplingSpec, order: str = "") -> Tensor:
    """Filtered, renormalised probabilities of [..., v] logits; ties at a cutoff stay."""
    probs = torch.softmax(logits.double() / spec.temperature, -1)
    ranked = probs.sort(-1, descending=True).values
    kept = torch.ones_like(probs, dtype=torch.bool)
    if spec.top_k:
        kept = probs >= ranked[..., spec.top_k - 1 : spec.top_k]
    if spec.top_p < 1:
        base = probs if (order or spec.filter_order) == "joint" else torch.where(kept, probs, 0)
        base = base / base.sum(-1, keepdim=True)
        ranked = base.sort(-1, descending=True).values
        last = (ranked.cumsum(-1) < spec.top_p).sum(-1, keepdim=True).clamp_max(probs.shape[-1] - 1)
        kept = kept & (base >= ranked.gather(-1, last))
    filtered = torch.where(kept, probs, 0)
    return filtered / filtered.sum(-1, keepdim=True)


def distances(rows: SupportRows, laws: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Total variation of each row to its law [n, v] (a head: over its own ids), and whether the supports are equal."""
    row, dense = np.repeat(np.arange(len(rows)), rows.lengths), laws.numpy()
    recorded = np.zeros_like(dense)
    recorded[row, rows.token_ids] = np.exp(rows.logprobs.astype(np.float64))
    if rows.kind == "head":
        dense = np.where(recorded > 0, dense, 0)
    return np.abs(recorded - dense).sum(1) / 2, ((recorded > 0) == (dense > 0)).all(1)
