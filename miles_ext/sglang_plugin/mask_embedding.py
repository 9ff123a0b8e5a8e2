"""The draft's own mask embedding, kept out of the target.

sglang copies `mask_embedding.pt` of the draft into a row of the target's embedding: with tied heads that changes the
target's law, and the next target update overwrites it. Here the target stays as it is, and the draft's lookup sees the
trained vector in the place of the mask token. Nothing needs to be applied again after an update.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FILE_NAME = "mask_embedding.pt"


class MaskedLookup:
    """An embedding module as the draft sees it. Not a torch module: the draft must not adopt the target's weights."""

    def __init__(self, module: Any, token_id: int, vector: Tensor) -> None:
        self._module, self._token_id, self._vector = module, token_id, vector

    def __call__(self, ids: Tensor) -> Tensor:
        embedded = self._module(ids)
        return torch.where((ids == self._token_id)[..., None], self._vector.to(embedded.dtype), embedded)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def around_merge(_original: Callable[..., None], worker: Any) -> None:
    """Loads the vector and keeps it beside the draft model. Raises ValueError for a file this worker cannot honour."""
    path = _draft_path(worker)
    if path is None or not (path / FILE_NAME).exists():
        return
    saved = torch.load(path / FILE_NAME, map_location=worker.device, weights_only=True)
    token_id = int(saved["mask_token_id"])
    if token_id != worker._mask_token_id:
        raise ValueError(
            f"{path / FILE_NAME} was trained for mask token {token_id}, this draft uses {worker._mask_token_id}"
        )
    if saved.get("per_position"):
        raise ValueError(f"{path / FILE_NAME} holds an embedding a position; accepted: one vector")
    if worker._full_embed_gpu is not None or _attention_dp():
        raise ValueError(f"{path / FILE_NAME} beside data-parallel attention; accepted: one attention group")
    weight = worker._target_worker.model_runner.model.get_input_embeddings().weight
    worker.draft_model.sc_mask_embedding = (token_id, saved["embedding"].to(weight.device, weight.dtype))


def after_resolve(module: Any, draft_model: Any, _target_model: Any) -> Any:
    mask = getattr(draft_model, "sc_mask_embedding", None)
    return None if mask is None else MaskedLookup(module, *mask)


def _draft_path(worker: Any) -> Path | None:
    from sglang.srt.arg_groups.overrides import resolving_view

    path = resolving_view(worker.server_args).speculative_draft_model_path
    return None if path is None else Path(path)


def _attention_dp() -> bool:
    from sglang.srt.runtime_context import get_parallel

    return bool(get_parallel().attn_dp_enabled)
