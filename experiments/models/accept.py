"""Accept length of a draft: a plain speculative decoding loop over the models, independent of the engine."""

import torch

from rollout.embedded.draft import Draft


@torch.no_grad()
def accept_length(
    draft: Draft,
    prompts: torch.Tensor,
    new_tokens: int,
    generator: torch.Generator,
    selector: bool,
    lengths: torch.Tensor | None = None,
    stop: int | None = None,
) -> float:
    """Committed tokens a row and step, the bonus included, at temperature 1 over at most `new_tokens` a response.

    prompts int64 [B, P] with `lengths` int64 [B] (default: P), like the generator on the target's device. `stop` ends a
    response. With `selector`, a sampled path under chain rejection; without, greedy proposals accepted while the target
    draws the same token. Proposals past the end of a response count as if they were not made.
    """
    target, size = draft.target, draft.config.block_size
    rows, width = prompts.shape
    device, limit = target.device, target.config.max_positions
    lengths = torch.full((rows,), width, device=device) if lengths is None else lengths
    ends = lengths + new_tokens
    longest = min(width + new_tokens + size, limit)
    cache, context = target.new_cache(rows, longest), draft.new_cache(rows, longest)
    every, row = slice(0, rows), torch.arange(rows, device=device)
    offsets = torch.arange(size, device=device)
    positions = torch.arange(width, device=device).expand(rows, -1)
    positions = positions.where(positions < lengths[:, None], -1)
    hidden, taps = target.forward(prompts, positions, cache, every, width, draft.config.taps)
    assert taps is not None
    draft.append(taps, positions, context, every)

    def draw(probs: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(probs.flatten(0, -2), 1, generator=generator).view(probs.shape[:-1])

    anchors = draw(torch.softmax(target.logits(hidden[row, lengths - 1]).double(), -1))
    starts = lengths.clone()
    live = (starts < ends - 1) if stop is None else (starts < ends - 1) & (anchors != stop)
    committed = steps = 0
    while live.any():
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
        if selector:
            anchors = draw((p[row, count] - dense[row, count]).clamp_min(0) + 1e-300)
        else:
            anchors = drawn[row, count]
        tokens = torch.cat((proposed, anchors[:, None]), 1).scatter(1, count[:, None], anchors[:, None])
        draft.append(taps, positions.where((offsets <= count[:, None]) & live[:, None], -1), context, every)
        gained = (count + 1).minimum(ends - 1 - starts)
        if stop is not None:
            at = torch.where((tokens == stop) & (offsets < gained[:, None]), offsets, size).amin(1)
            ended, gained = at < size, gained.minimum(at + 1)
        else:
            ended = torch.zeros_like(live)
        gained = gained.where(live, 0)
        committed, steps = committed + int(gained.sum()), steps + int(live.sum())
        starts = starts + gained
        live = live & ~ended & (starts < ends - 1)
    return committed / max(1, steps)


def _pad(rows: torch.Tensor) -> torch.Tensor:
    """One more, empty, slot: the bonus position proposes nothing."""
    return torch.cat((rows, rows[:, -1:] * 0), 1)
