"""What a training backend offers. The step is written against this alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from miles_ext.logprobs import VocabShard
from trainer.batch import Batch

LossFn = Callable[[torch.Tensor, slice], tuple[torch.Tensor, torch.Tensor]]
"""(logits [m, v] of the batch's scored rows `slice`, that slice) -> (loss to minimise, a scalar; metric sums [k])."""


class Backend(Protocol):
    """A model, its optimizer and its share of the data-parallel ranks. Collective: every rank makes the same calls."""

    rank: int
    world_size: int
    data_rank: int
    data_size: int
    """Ranks of one data rank (tensor and pipeline parallel) get the same batches."""
    shard: VocabShard | None
    """The columns of the vocabulary that this rank's logits have; None: all of them."""
    updates: int
    """Optimizer updates done."""

    def forward_backward(self, batches: Sequence[Batch], loss_fns: Sequence[LossFn]) -> torch.Tensor | None:
        """The gradient of the losses of one update; return this rank's metric sums [k], or None where it has none.

        The backend owns the schedule: it may call a `loss_fn` on any slices that cover its batch's scored rows once.
        Gradients are summed, never averaged, over batches and data ranks. Of the ranks that score the same rows, one
        returns their sums.
        """
        ...

    def whole_rows(self, columns: torch.Tensor | None) -> torch.Tensor | None:
        """[n, V] at rank 0, from [n, v] of the ranks of data rank 0 that have logits and None from all others."""
        ...

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise sum of a small tensor over all ranks."""
        ...

    def grad_norm(self) -> float:
        """Global L2 norm of the summed gradient, equal on every rank."""
        ...

    def non_finite_gradients(self) -> list[str]:
        """Names of this rank's parameters whose gradient holds a non-finite number."""
        ...

    def step(self, grad_norm: float) -> float:
        """Clip by the given norm, update the weights, clear the gradient; return the learning rate used."""
        ...

    def zero_grad(self) -> None: ...

    def export_hf(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, whole tensor on the host or the model's device), one at a time, tied heads once. Collective: every
        rank must exhaust it; ranks other than 0 may get nothing."""
        ...

    def save_hf(self, folder: Path) -> None:
        """Write the weights and configuration as a Hugging Face folder (rank 0 writes)."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and update count into an existing folder (every rank its share)."""
        ...

    def load(self, folder: Path) -> None:
        """Inverse of `save`, for any number of ranks. CheckpointError where it is of another model."""
        ...
