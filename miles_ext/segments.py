"""Rows of unequal length inside one flat array: sums, log-sum-exps and broadcasts along them.

Rows of equal length (heads) are worked on as a plain matrix, which is far cheaper than segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Shaped
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Segments:
    """Row r spans entries offsets[r]:offsets[r + 1].

    host_offsets: int64 [n + 1] on the host, so that slicing never waits for a device. offsets: the same on the device.
    index: int64 [nnz], the row of each entry. width: entries a row where all rows have the same number of them
    (reductions are then plain ones over a [n, width] view), else None.
    """

    host_offsets: NDArray[np.int64]
    offsets: Int[Tensor, " rows_plus_one"]
    index: Int[Tensor, " nnz"]
    width: int | None

    @classmethod
    def from_offsets(cls, offsets: NDArray[np.integer], device: torch.device | str = "cpu") -> Segments:
        """From host offsets [n + 1] that start at 0 and never fall; equal widths are found here, on the host."""
        offsets = np.asarray(offsets, np.int64)
        lengths = np.diff(offsets)
        if len(offsets) == 0 or offsets[0] != 0 or (lengths < 0).any():
            raise ValueError(f"offsets {offsets[:8]}...; accepted: int64 [rows + 1], from 0 and never falling")
        equal = len(lengths) == 0 or bool((lengths == lengths[0]).all())
        index = np.repeat(np.arange(len(lengths)), lengths)
        return cls(
            host_offsets=offsets,
            offsets=torch.from_numpy(offsets.copy()).to(device),
            index=torch.from_numpy(index).to(device),
            width=(int(lengths[0]) if len(lengths) else 0) if equal else None,
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def part(self, start: int, stop: int) -> tuple[slice, Segments]:
        """Rows start:stop: where their entries lie, and their layout."""
        first, last = int(self.host_offsets[start]), int(self.host_offsets[stop])
        layout = Segments(
            host_offsets=self.host_offsets[start : stop + 1] - first,
            offsets=self.offsets[start : stop + 1] - first,
            index=self.index[first:last] - start,
            width=self.width,
        )
        return slice(first, last), layout

    @cached_property
    def widest(self) -> int:
        """Entries of the longest row, found on the host."""
        return self.width if self.width is not None else int(np.diff(self.host_offsets).max(initial=0))

    @property
    def lengths(self) -> Int[Tensor, " n"]:
        return self.offsets.diff()

    def fold(self, entries: Shaped[Tensor, " nnz"]) -> Shaped[Tensor, "*entries"]:
        """The entries in the shape that `spread` broadcasts against: [n, width], or flat for unequal rows."""
        return entries if self.width is None else entries.view(len(self), self.width)

    def spread(self, per_row: Shaped[Tensor, " n"]) -> Shaped[Tensor, "*entries"]:
        """The row's value at each of its folded entries; a mere view for equal widths."""
        return per_row[self.index] if self.width is None else per_row[:, None]

    def sum(self, folded: Float[Tensor, "*entries"]) -> Float[Tensor, " n"]:
        if self.width is None:
            return torch.segment_reduce(folded, "sum", offsets=self.offsets, unsafe=True)
        return folded.sum(-1)

    def logsumexp(self, folded: Float[Tensor, "*entries"]) -> Float[Tensor, " n"]:
        """-inf for an empty row and for a row of -inf."""
        if self.width is not None:
            return folded.logsumexp(-1)
        top = torch.segment_reduce(folded, "max", offsets=self.offsets, unsafe=True)
        top = torch.where(top == -torch.inf, 0.0, top)
        return self.sum((folded - self.spread(top)).exp()).log() + top
