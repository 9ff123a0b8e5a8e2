"""Plain batched sampling from a decoder: the data of draft training and quick evaluations, not an engine."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rollout.embedded.decoder import Decoder

GRANULE = 64  # cached positions read are a multiple of it: fused attention kernels want aligned masks


class Texts(NamedTuple):
    """Sampled texts, each row by its own positions: the prompt, the response right after it, then nothing."""

    tokens: torch.Tensor  # int64 [B, P + new_tokens]
    prompt_lengths: torch.Tensor  # int64 [B]
    taps: torch.Tensor  # tapped hidden states [B, P + new_tokens - 1, K * H]; K = 0 without taps
    hidden: torch.Tensor  # final hidden states [B, P + new_tokens - 1, H]; zero where no token was read


def pad(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts as int64 [B, P], padded on the right with id 0, and their lengths int64 [B]."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    padded = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = torch.tensor(prompt)
    return padded, lengths


@torch.no_grad()
def sample(
    decoder: Decoder,
    prompts: torch.Tensor,
    new_tokens: int,
    generator: torch.Generator,
    temperature: float = 1.0,
    taps: tuple[int, ...] = (),
    lengths: torch.Tensor | None = None,
) -> Texts:
    """Continue prompts int64 [B, P] by `new_tokens`, stopping nowhere; all on the decoder's device.

    lengths: int64 [B], tokens of each prompt that count (default: all of them).
    """
    rows, width = prompts.shape
    device, dtype, size = decoder.device, decoder.dtype, decoder.config.hidden_size
    total = width + new_tokens
    lengths = torch.full((rows,), width, device=device) if lengths is None else lengths
    cache = decoder.new_cache(rows, min(-(-total // GRANULE) * GRANULE, decoder.config.max_positions))
    tokens = torch.zeros(rows, total, dtype=torch.int64, device=device)
    features = torch.zeros(rows, total - 1, len(taps) * size, dtype=dtype, device=device)
    finals = torch.zeros(rows, total - 1, size, dtype=dtype, device=device)
    every, index = slice(0, rows), torch.arange(rows, device=device)

    positions = torch.arange(width, device=device).expand(rows, -1)
    given = positions < lengths[:, None]
    tokens[:, :width] = prompts.where(given, 0)
    hidden, tapped = decoder.forward(tokens[:, :width], positions.where(given, -1), cache, every, width, taps)
    finals[:, :width] = hidden.where(given[..., None], 0)
    if tapped is not None:
        features[:, :width] = tapped.where(given[..., None], 0)
    last = hidden[index, lengths - 1]
    for step in range(new_tokens):
        probs = torch.softmax(decoder.logits(last).double() / temperature, -1)
        fresh, at = torch.multinomial(probs, 1, generator=generator), lengths + step
        tokens[index, at] = fresh[:, 0]
        if step == new_tokens - 1:
            break
        length = min(-(-(width + step + 1) // GRANULE) * GRANULE, cache.max_len)
        hidden, tapped = decoder.forward(fresh, at[:, None], cache, every, length, taps)
        last = hidden[:, 0]
        finals[index, at] = last
        if tapped is not None:
            features[index, at] = tapped[:, 0]
    return Texts(tokens, lengths, features, finals)
