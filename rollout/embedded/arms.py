"""What one step of each arm computes on the device: propose, score with the target, verify."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from miles_ext.capability import ArmKind
from miles_ext.law import sample
from miles_ext.seeds import Purpose
from rollout.embedded.decoder import Decoder
from rollout.embedded.draft import Draft
from rollout.embedded.verify import Verdict, verify_chain, verify_target_only

LawOf = Callable[[Tensor], Tensor]  # logits [B, n, V] -> laws [B, n, V]


class Step(NamedTuple):
    """probs: [B, n, V], the laws that every committed token of `verdict` was drawn from."""

    probs: Tensor
    verdict: Verdict


class Regular:
    """One token a step. Also what the block arms share: the target, its cache, and the prefill."""

    width = 1
    purposes: tuple[Purpose, ...] = (Purpose.TOKEN,)
    taps: tuple[int, ...] = ()

    def __init__(self, target: Decoder, slots: int, context_length: int) -> None:
        self.target = target
        self.cache = target.new_cache(slots, context_length)

    def prefill(self, tokens: Tensor, positions: Tensor, last: Tensor, slots: slice) -> Tensor:
        """Logits [A, 1, V] after prompts `tokens` int64 [A, P]; positions -1 pad; last: int64 [A], index of the end."""
        hidden, features = self.target.forward(
            tokens, positions, self.cache, slots, length=tokens.shape[1], taps=self.taps
        )
        if features is not None:
            self.remember(features, positions, slots)
        ends = hidden[torch.arange(len(last), device=last.device), last]
        return self.target.logits(ends)[:, None]

    def remember(self, features: Tensor, positions: Tensor, slots: slice) -> None:
        """Nothing to remember without a draft."""

    @staticmethod
    def first(probs: Tensor, uniforms: Tensor) -> Verdict:
        """One token from laws [B, n, V] of one slot each, by the first uniform of [B, *, purposes] (`TOKEN`)."""
        tokens = sample(probs[:, 0], uniforms[:, 0, 0])[:, None]
        return Verdict(tokens, torch.ones_like(tokens[:, 0]))

    def step(
        self, anchors: Tensor, starts: Tensor, slots: slice, length: int, uniforms: Tensor, heat: Tensor, law_of: LawOf
    ) -> Step:
        """anchors, starts: int64 [B], the last committed tokens and their positions. length: exceeds every start.
        uniforms: float64 [B, width, purposes]. heat: [B], positive temperatures for the draft."""
        hidden, _ = self.target.forward(anchors[:, None], starts[:, None], self.cache, slots, length)
        probs = law_of(self.target.logits(hidden))
        return Step(probs, self.first(probs, uniforms))

    def clear(self, slots: Tensor) -> None:
        self.cache.clear(slots)

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        self.cache.move(sources, targets, length)


class DFlash(Regular):
    """A block a step: greedy proposals, and the target alone decides."""

    def __init__(self, target: Decoder, draft: Draft, slots: int, context_length: int) -> None:
        super().__init__(target, slots, context_length)
        self.draft = draft
        self.draft_cache = draft.new_cache(slots, context_length)
        self.width, self.taps = draft.config.block_size, draft.config.taps
        self._offsets = torch.arange(self.width, device=target.device)

    def remember(self, features: Tensor, positions: Tensor, slots: slice) -> None:
        self.draft.append(features, positions, self.draft_cache, slots)

    def clear(self, slots: Tensor) -> None:
        super().clear(slots)
        self.draft_cache.clear(slots)

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        super().move(sources, targets, length)
        self.draft_cache.move(sources, targets, length)

    def step(
        self, anchors: Tensor, starts: Tensor, slots: slice, length: int, uniforms: Tensor, heat: Tensor, law_of: LawOf
    ) -> Step:
        drafted = self.draft.propose_greedy(anchors, starts, self.draft_cache, slots, length)
        probs = self._score(anchors, drafted, starts, slots, length, law_of)
        return Step(probs, verify_target_only(probs, drafted, uniforms[..., 0]))

    def _score(
        self, anchors: Tensor, drafted: Tensor, starts: Tensor, slots: slice, length: int, law_of: LawOf
    ) -> Tensor:
        """The target's laws [B, n, V]. Features of rejected slots are overwritten before anything reads them."""
        block = torch.cat((anchors[:, None], drafted), 1)
        positions = starts[:, None] + self._offsets
        hidden, features = self.target.forward(
            block, positions, self.cache, slots, length + self.width - 1, taps=self.taps
        )
        assert features is not None
        self.remember(features, positions, slots)
        return law_of(self.target.logits(hidden))


class DFlash2(DFlash):
    """A block a step: a sampled path with its probabilities, verified by chain rejection."""

    purposes = (Purpose.TOKEN, Purpose.PROPOSE, Purpose.ACCEPT, Purpose.RESIDUAL)

    def step(
        self, anchors: Tensor, starts: Tensor, slots: slice, length: int, uniforms: Tensor, heat: Tensor, law_of: LawOf
    ) -> Step:
        token, propose, accept, residual = uniforms.unbind(-1)
        path = self.draft.propose_path(anchors, starts, self.draft_cache, propose[:, :-1], heat, slots, length)
        probs = self._score(anchors, path.tokens, starts, slots, length, law_of)
        verdict = verify_chain(probs, path.tokens, path.candidates, path.probs, accept, residual, token)
        return Step(probs, verdict)


ARM_OF: dict[ArmKind, type[Regular]] = {"regular": Regular, "dflash": DFlash, "dflash2": DFlash2}
