"""Trainer logits and a sampler's recorded laws, fresh with every call."""

from collections.abc import Sequence

import numpy as np
import torch


def arrays_of(v: int, lengths: Sequence[int], kind: str, dtype: torch.dtype = torch.float64):
    """(logits float64 that `dtype` holds exactly, the arrays of `SupportTensors.from_arrays`, advantages float64).

    The sampler is the trainer plus logit noise. lengths: entries of each row; an empty complete row has no law.
    """
    n = len(lengths)
    z = (torch.randn(n, v, dtype=torch.float64) * 3).to(dtype).double()
    laws = (z + 0.3 * torch.randn(n, v, dtype=torch.float64)).log_softmax(-1)
    columns = ids, logprobs, sampled, sampled_logprobs = [], [], [], []
    for law, length in zip(laws, lengths, strict=True):
        lq, top = law.topk(length)
        if kind == "complete" and length:
            law = torch.full_like(law, -torch.inf).scatter(0, top, lq - lq.logsumexp(-1))
            lq = law[top]
        token = int(torch.multinomial(law.exp(), 1))
        for column, value in zip(columns, (top, lq, token, float(law[token])), strict=True):
            column.append(value)
    arrays = (
        torch.cat(ids).numpy(), torch.cat(logprobs).numpy(), np.concatenate([[0], np.cumsum(lengths)]),
        np.array(sampled), np.array(sampled_logprobs),
    )  # fmt: skip
    return z, arrays, torch.randn(n, dtype=torch.float64)
