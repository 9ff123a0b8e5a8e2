"""Dense key/value slots with ragged rows.

Storage is [layers, 2, slots + 1, kv_heads, max_len, head_dim]. A token is written at its own position of its own
slot, so rows of a batch may be at different lengths. The last slot is the spill slot: whatever must not be kept
(padding, finished rows, positions past the end) is written there and never read.

Stale entries are harmless: attention is bounded by position, and a position is always rewritten by the token that
claims it before any query may look that far.
"""

from typing import NamedTuple

import torch

Slots = slice | torch.Tensor


class WritePlan(NamedTuple):
    """Where one forward pass writes and what it reads; shared by all layers."""

    rows: torch.Tensor  # int64 [B * Tq * kv_heads], rows of the flattened [slots * kv_heads * max_len, head_dim]
    slots: Slots
    length: int  # positions 0 .. length - 1 are read


class KVCache:
    """Key/value storage for `slots` sequences of at most `max_len` positions."""

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        max_len: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        self.num_slots, self.kv_heads, self.max_len = slots, kv_heads, max_len
        # Zeros, not garbage: a masked NaN would still poison the weighted sum of values.
        self.storage = torch.zeros(layers, 2, slots + 1, kv_heads, max_len, head_dim, dtype=dtype, device=device)
        self._flat = [[side.view(-1, head_dim) for side in layer] for layer in self.storage]
        self._heads = torch.arange(kv_heads, device=device)

    def plan(self, slots: Slots, positions: torch.Tensor, length: int | None = None) -> WritePlan:
        """Plan writes at `positions` int64 [B, Tq] of `slots` (a slice, or int64 [B]).

        Positions outside 0 .. max_len - 1 go to the spill slot. `length` bounds what is read; it must exceed every
        position whose result matters (None: the whole slot). Host work only, no device sync.
        """
        if isinstance(slots, slice):
            slot_ids = torch.arange(self.num_slots, device=positions.device)[slots]
        else:
            slot_ids = slots
        kept = (positions >= 0) & (positions < self.max_len)
        slot_of = torch.where(kept, slot_ids[:, None], self.num_slots)
        position_of = positions.clamp(0, self.max_len - 1)
        rows = (slot_of[..., None] * self.kv_heads + self._heads) * self.max_len + position_of[..., None]
        return WritePlan(rows.flatten(), slots, min(length or self.max_len, self.max_len))

    def write(self, layer: int, plan: WritePlan, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values [B, Tq, kv_heads, head_dim] where the plan says."""
        head_dim = keys.shape[-1]
        self._flat[layer][0].index_copy_(0, plan.rows, keys.reshape(-1, head_dim))
        self._flat[layer][1].index_copy_(0, plan.rows, values.reshape(-1, head_dim))

    def read(self, layer: int, plan: WritePlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, kv_heads, length, head_dim]: views for a slice of slots, a gathered copy otherwise."""
        keys, values = self.storage[layer, 0], self.storage[layer, 1]
        return keys[plan.slots, :, : plan.length], values[plan.slots, :, : plan.length]

    def clear(self, slots: torch.Tensor) -> None:
        """Zero slots int64 [n] that may hold NaN: a masked NaN would still poison whoever uses the slot next."""
        self.storage[:, :, slots] = 0.0

    def move(self, sources: torch.Tensor, targets: torch.Tensor, length: int) -> None:
        """Copy the first `length` positions of slots `sources` int64 [n] over slots `targets` int64 [n]."""
        self.storage[:, :, targets, :, :length] = self.storage[:, :, sources, :, :length]
