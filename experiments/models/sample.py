"""Plain batched sampling from a decoder: the data of draft training and quick evaluations, not an engine."""

import torch

from rollout.embedded.decoder import Decoder


@torch.no_grad()
def sample(
    decoder: Decoder,
    prompts: torch.Tensor,
    new_tokens: int,
    generator: torch.Generator,
    temperature: float = 1.0,
    taps: tuple[int, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Continue equally long prompts int64 [B, P] by `new_tokens`, stopping nowhere; all on the decoder's device.

    Returns tokens [B, P + new_tokens] and, of all positions but the last, the tapped hidden states
    [B, P + new_tokens - 1, K * H] (K = 0 without taps) and the final ones [B, P + new_tokens - 1, H].
    """
    rows, length = prompts.shape
    cache = decoder.new_cache(rows, length + new_tokens)
    tokens, features, finals = prompts, [], []
    fresh, start = prompts, 0
    for _ in range(new_tokens):
        stop = start + fresh.shape[1]
        positions = torch.arange(start, stop, device=prompts.device).expand(rows, -1)
        hidden, tapped = decoder.forward(fresh, positions, cache, slice(0, rows), stop, taps)
        probs = torch.softmax(decoder.logits(hidden[:, -1]).double() / temperature, -1)
        fresh, start = torch.multinomial(probs, 1, generator=generator), stop
        tokens = torch.cat((tokens, fresh), 1)
        finals.append(hidden)
        features.append(hidden[..., :0] if tapped is None else tapped)
    return tokens, torch.cat(features, 1), torch.cat(finals, 1)
