"""Accept length of a draft: a plain speculative decoding loop over the models, independent of the engine."""

import torch

from rollout.embedded.draft import Draft


@torch.no_grad()
def accept_length(
    draft: Draft, prompts: torch.Tensor, new_tokens: int, generator: torch.Generator, selector: bool
) -> float:
    """Committed tokens a row and step, the bonus included, at temperature 1 over `new_tokens` that stop nowhere.

    prompts int64 [B, P], like the generator on the target's device. With `selector`, a sampled path under chain
    rejection; without, greedy proposals accepted while the target draws the same token. Proposals past the end of a
    response count as if they were not made.
    """
    target, size = draft.target, draft.config.block_size
    rows, prompt = prompts.shape
    end = prompt + new_tokens
    cache, context = target.new_cache(rows, min(end + size, target.config.max_positions)), draft.new_cache(rows)
    every = slice(0, rows)
    device = target.device
    offsets = torch.arange(size, device=device)
    positions = torch.arange(prompt, device=device).expand(rows, -1)
    hidden, taps = target.forward(prompts, positions, cache, every, prompt, draft.config.taps)
    assert taps is not None
    draft.append(taps, positions, context, every)

    def draw(probs: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(probs.flatten(0, -2), 1, generator=generator).view(probs.shape[:-1])

    anchors = draw(torch.softmax(target.logits(hidden[:, -1]).double(), -1))
    starts = torch.full((rows,), prompt, device=device)
    committed = steps = 0
    while (live := starts < end - 1).any():
        length = int(starts.max()) + 1
        where = starts.where(live, -1)
        if selector:
            uniforms = torch.rand(rows, size - 1, generator=generator, dtype=torch.float64, device=device)
            proposed, candidates, q = draft.propose_path(anchors, where, context, uniforms, 1.0, every, length)
        else:
            proposed = draft.propose_greedy(anchors, where, context, every, length)
        block = torch.cat((anchors[:, None], proposed), 1)
        positions = (where[:, None] + offsets).where(live[:, None], -1)
        hidden, taps = target.forward(block, positions, cache, every, length + size, draft.config.taps)
        assert taps is not None
        p = torch.softmax(target.logits(hidden).double(), -1)
        if selector:
            dense = torch.zeros_like(p).scatter_(-1, _pad(candidates), _pad(q))
            here = proposed[..., None]
            ratio = (p[:, :-1].gather(-1, here) / dense[:, :-1].gather(-1, here)).squeeze(-1)
            accepted = torch.rand(ratio.shape, generator=generator, dtype=torch.float64, device=device) < ratio
        else:
            drawn = draw(p)
            accepted = drawn[:, :-1] == proposed
        count = accepted.int().cumprod(1).sum(1)
        at = count[:, None, None].expand(-1, 1, p.shape[-1])
        if selector:
            residual = (p - dense).clamp_min(0).gather(1, at)[:, 0] + 1e-300
            anchors = draw(residual)
        else:
            anchors = drawn.gather(1, count[:, None])[:, 0]
        keep = offsets <= count[:, None]
        draft.append(taps, positions.where(keep & live[:, None], -1), context, every)
        gained = (count + 1).minimum(end - 1 - starts).where(live, 0)
        committed, steps = committed + int(gained.sum()), steps + int(live.sum())
        starts = starts + gained
    return committed / steps


def _pad(rows: torch.Tensor) -> torch.Tensor:
    """One more, empty, slot: the bonus position proposes nothing."""
    return torch.cat((rows, rows[:, -1:] * 0), 1)
