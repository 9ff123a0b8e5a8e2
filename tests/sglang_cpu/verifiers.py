"""Test implementations of sglang's two accept kernels, for a CPU. Capability reports them as `test`.

Both write `predicts`, `accept_index` and `accept_token_num` in place, as the kernels do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def target_only(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    **_: Any,
) -> None:
    """Accepts a candidate with its target probability; after a rejection the candidate's mass is left out."""
    for b, tokens in enumerate(candidates.tolist()):
        accepted, law = 0, target_probs[b, 0].double()
        while accepted < len(tokens) - 1:
            candidate = tokens[accepted + 1]
            if not float(uniform_samples[b, accepted]) < float(law[candidate]):
                law = law.index_fill(0, torch.tensor([candidate]), 0.0)
                break
            accepted += 1
            law = target_probs[b, accepted].double()
        _write(b, tokens, accepted, _invert(law, uniform_samples_for_final_sampling[b]), retrive_index, predicts)
        accept_token_num[b] = accepted
        accept_index[b, : accepted + 1] = retrive_index[b, : accepted + 1].int()


def chain(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    **_: Any,
) -> None:
    """Rejection sampling against the draft's law; after a rejection the bonus comes from the positive part of p - q."""
    for b, tokens in enumerate(candidates.tolist()):
        accepted, law = 0, target_probs[b, 0].double()
        while accepted < len(tokens) - 1:
            candidate, draft = tokens[accepted + 1], draft_probs[b, accepted].double()
            coin = float(uniform_samples[b, accepted])
            if not (float(draft[candidate]) > 0 and coin * float(draft[candidate]) < float(law[candidate])):
                law = (law - draft).clamp_min(0)
                break
            accepted += 1
            law = target_probs[b, accepted].double()
        _write(b, tokens, accepted, _invert(law, uniform_samples_for_final_sampling[b]), retrive_index, predicts)
        accept_token_num[b] = accepted
        accept_index[b, : accepted + 1] = retrive_index[b, : accepted + 1].int()


def _write(row: int, tokens: list[int], accepted: int, bonus: int, index: Tensor, predicts: Tensor) -> None:
    for position in range(accepted):
        predicts[index[row, position]] = tokens[position + 1]
    predicts[index[row, accepted]] = bonus


def _invert(mass: Tensor, uniform: Tensor) -> int:
    cdf = mass.cumsum(0)
    return int((cdf > float(uniform) * cdf[-1]).int().argmax())
