"""Micro-batches without padding: all sequences in one line, each with its own positions and its own attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from trainer.batch import Batch


@dataclass
class Packed(PackedSeqParams):
    """T tokens of B sequences; megatron-core carries it to every layer.

    Feed-forward and projections see T tokens; only attention spreads them over [B, L].
    """

    input_ids: torch.Tensor | None = None
    """int64 [1, T]."""
    positions: torch.Tensor | None = None
    """int64 [T], counted from each sequence's start."""
    rows: torch.Tensor | None = None
    """int64 [n], the scored rows among the T."""
    spread: torch.Tensor | None = None
    """int64 [B * L], token at each place of the padded layout; padding repeats token 0, which nothing looks at."""
    gather: torch.Tensor | None = None
    """int64 [T], inverse of `spread`."""
    lines: int = 0
    """B."""


def pack(batch: Batch, device: torch.device) -> Packed:
    """All index arithmetic on the host, once a micro-batch."""
    lines, width = batch.input_ids.shape
    real = np.arange(width) < batch.lengths[:, None]
    places = np.flatnonzero(real)
    token_at = np.zeros(lines * width, np.int64)
    token_at[places] = np.arange(len(places))
    packed = Packed(qkv_format="sbhd", max_seqlen_q=width, max_seqlen_kv=width, lines=lines)
    for name, array in (
        ("input_ids", batch.input_ids[real][None]), ("positions", places % width), ("rows", token_at[batch.rows]),
        ("spread", token_at), ("gather", places),
    ):  # fmt: skip
        setattr(packed, name, torch.from_numpy(array).to(device))
    return packed


class PackedAttention(nn.Module):
    """Causal attention of each packed sequence by itself; takes the place of megatron-core's own core attention."""

    def __init__(self, *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None = None,
        *, packed_seq_params: Packed, **_: Any,
    ) -> torch.Tensor:  # fmt: skip
        """[T, 1, heads, D], key and value with as many heads or a divisor of them -> [T, 1, heads * D]."""
        spread, gather = packed_seq_params.spread, packed_seq_params.gather
        assert spread is not None and gather is not None

        def lines(tensor: torch.Tensor) -> torch.Tensor:  # [B, heads, L, D]
            return tensor[:, 0].index_select(0, spread).unflatten(0, (packed_seq_params.lines, -1)).transpose(1, 2)

        query, key, value = lines(query), lines(key), lines(value)
        grouped = query.shape[1] != key.shape[1]
        found = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale, enable_gqa=grouped
        )
        return found.transpose(1, 2).flatten(0, 1).index_select(0, gather).flatten(1)[:, None]


class PackedRotary(nn.Module):
    """Rotary angles [T, 1, 1, D] of the positions of the micro-batch at hand, from megatron-core's own table."""

    def __init__(self, table: RotaryEmbedding) -> None:
        super().__init__()
        self.table = table
        self.packed: Packed | None = None

    def get_rotary_seq_len(self, *_: Any) -> int:
        assert self.packed is not None and self.packed.max_seqlen_q
        return self.packed.max_seqlen_q

    def forward(self, length: int, **_: Any) -> torch.Tensor:
        assert self.packed is not None and self.packed.positions is not None
        return self.table(length).index_select(0, self.packed.positions)
