"""From token ids to the loss: only the hidden states that score a loss token reach the LM head, a chunk at a time."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from miles_ext.lm_head import head_loss
from trainer.backends.base import LossFn


class Scorer(nn.Module):
    """A causal language model and the loss on chosen rows of its logits."""

    def __init__(self, model: PreTrainedModel, chunk: int) -> None:
        """chunk: rows of logits that exist at a time. ValueError for a model that alters its logits after the head."""
        super().__init__()
        self.model, self.chunk = model, chunk
        if not isinstance(model.get_output_embeddings(), nn.Module):
            raise ValueError(f"{type(model).__name__} has no LM head; accepted: a causal language model")
        ids = torch.arange(8, device=model.device)[None] % model.config.vocab_size
        with torch.no_grad():
            whole = model(input_ids=ids, use_cache=False).logits[0]
            again = self.head(self.hidden(ids))
        if not torch.allclose(whole, again, rtol=1e-4, atol=1e-4):
            raise ValueError(
                f"{type(model).__name__} alters its logits after the LM head, by up to "
                f"{(whole - again).abs().max():.3g}; accepted: models whose logits are the head's output"
            )

    @property
    def head(self) -> nn.Module:
        return cast(nn.Module, self.model.get_output_embeddings())

    def hidden(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Final hidden states [B * L, H] of ids [B, L]. No mask: attention is causal, padding is on the right."""
        return self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state.flatten(0, 1)

    def forward(
        self, input_ids: torch.Tensor, rows: torch.Tensor, loss_fn: LossFn
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Loss (a scalar, float64) summed over rows, and the metric sums, None without rows."""
        hidden = self.hidden(input_ids).index_select(0, rows)
        return head_loss(hidden, self.head, list(self.head.parameters()), self.chunk, loss_fn)
