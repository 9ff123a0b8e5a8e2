"""The DFlash block draft: proposes a whole block of tokens in one pass over the target's tapped hidden states.

A block is the anchor (the last committed token, not yet in any cache) followed by mask embeddings; slot j predicts the
token at its own position, anchor + j. Each layer attends, without causality, to the block itself and to context keys
and values made from target features at positions before the anchor. The embedding and the head are the target's own,
read live; everything else is private (`private_tensors`) and no target update touches it.

With a selector (DFlash2) a block is sampled as a path through the likeliest candidates of each slot, with
score = unary logit + <predecessor row of the previous token * projected hidden state, successor row of the candidate>.

Architecture and checkpoint layout follow sglang 0.5.23 (models/dflash.py, speculative/dflash_worker_v2.py).
"""

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from rollout.embedded.checkpoint import check_tensors, read_config, read_tensors, write_model
from rollout.embedded.decoder import Decoder
from rollout.embedded.draft_config import DraftConfig
from rollout.embedded.kv_cache import KVCache, Slots
from rollout.embedded.transformer import Layer, Rope, additive_mask, attend

MASK_FILE = "mask_embedding.pt"


class Proposal(NamedTuple):
    """A sampled path and the law that each of its tokens was drawn from."""

    tokens: torch.Tensor  # int64 [B, block - 1]
    candidates: torch.Tensor  # int64 [B, block - 1, top_k], ids without repeats
    probs: torch.Tensor  # float64 [B, block - 1, top_k], probabilities of the candidates given the path so far


class Draft:
    """Weights and forward pass of one draft bound to its target."""

    def __init__(self, config: DraftConfig, target: Decoder):
        """Uninitialised weights in the target's dtype and on its device; ValueError for a draft of another target."""
        config.check_fits(target.config)
        self.config, self.target = config, target
        dtype, device, hidden = target.dtype, target.device, config.block.hidden_size

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        self.fc = empty(hidden, len(config.taps) * hidden)
        self.hidden_norm = empty(hidden)
        self.layers = [Layer(config.block, dtype, device) for _ in range(config.block.layers)]
        self.norm = empty(hidden)
        # None: the target's own row for the mask token serves, live.
        self.mask_embedding: torch.Tensor | None = None
        if config.selector:
            vocab, rank = config.block.vocab_size, config.selector_rank
            self.predecessor, self.successor = empty(vocab, rank), empty(vocab, rank)
            self.projection = empty(rank, hidden)
        # A block may begin at the target's last position.
        self.rope = Rope(config.block, target.config.max_positions + config.block_size, dtype, device)
        self._offsets = torch.arange(config.block_size, device=device)

    @classmethod
    def from_pretrained(cls, path: str | Path, target: Decoder) -> "Draft":
        """Load a draft folder (config.json, model.safetensors, perhaps mask_embedding.pt) for `target`.

        ValueError when the folder is no DFlash draft, uses a feature that is not built here, does not fit the target,
        or misses weights (sglang would leave those at their random start).
        """
        draft = cls(DraftConfig.from_hf(read_config(path)), target)
        tensors = {name.removeprefix("model."): tensor for name, tensor in read_tensors(path).items()}
        views = draft.named_hf_tensors()
        check_tensors(tensors, views, f"the draft checkpoint {path}")
        for name, view in views.items():
            view.copy_(tensors[name])
        mask_file = Path(path) / MASK_FILE
        if mask_file.is_file():
            saved = torch.load(mask_file, map_location="cpu", weights_only=True)
            if int(saved["mask_token_id"]) != draft.config.mask_token_id or saved.get("per_position"):
                raise ValueError(
                    f"{mask_file} was made for mask_token_id {saved['mask_token_id']} "
                    f"(per_position={saved.get('per_position', False)}); config.json needs one embedding for "
                    f"mask_token_id {draft.config.mask_token_id}"
                )
            draft.mask_embedding = saved["embedding"].reshape(draft.norm.shape).to(target.device, target.dtype)
        return draft

    def save_pretrained(self, path: str | Path, dtype: torch.dtype) -> None:
        """Write the folder that `from_pretrained` and sglang read, weights cast to `dtype`."""
        tensors = {name: tensor.to(dtype) for name, tensor in self.named_hf_tensors().items()}
        write_model(path, self.config.to_hf(dtype), tensors)
        if self.mask_embedding is not None:
            embedding = self.mask_embedding.detach().cpu().to(dtype).clone()
            torch.save({"embedding": embedding, "mask_token_id": self.config.mask_token_id}, Path(path) / MASK_FILE)

    def resized(self, block_size: int) -> "Draft":
        """The same memory with blocks of another size, at most this one's."""
        if not 2 <= block_size <= self.config.block_size:
            raise ValueError(f"block_size is {block_size}; accepted: 2 to the {self.config.block_size} of this draft")
        other = copy(self)
        other.config, other._offsets = replace(self.config, block_size=block_size), self._offsets[:block_size]
        return other

    def named_hf_tensors(self) -> dict[str, torch.Tensor]:
        """Views of the weights of model.safetensors under their checkpoint names."""
        named = {"fc.weight": self.fc, "hidden_norm.weight": self.hidden_norm, "norm.weight": self.norm}
        for i, layer in enumerate(self.layers):
            named.update(layer.hf_views(f"layers.{i}."))
        if self.config.selector:
            named["candidate_selector.predecessor_codebook"] = self.predecessor
            named["candidate_selector.successor_codebook"] = self.successor
            named["candidate_selector.hidden_projection.weight"] = self.projection
        return named

    def private_tensors(self) -> dict[str, torch.Tensor]:
        """Every private byte by name: the checkpoint's weights and the mask embedding."""
        private = self.named_hf_tensors()
        if self.mask_embedding is not None:
            private["mask_embedding"] = self.mask_embedding
        return private

    def resident_tensors(self) -> dict[str, torch.Tensor]:
        """The same private memory as it lies, fused, under the engine's own names."""
        names = ("fc", "hidden_norm", "norm", "mask_embedding")
        names += ("predecessor", "successor", "projection") if self.config.selector else ()
        resident = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        for i, layer in enumerate(self.layers):
            resident.update(layer.resident(f"layers.{i}."))
        return resident

    def new_cache(self, slots: int, max_len: int | None = None) -> KVCache:
        """A context cache for `slots` sequences of `max_len` committed positions, with room for a block after them."""
        block, limit = self.config.block, self.target.config.max_positions
        max_len = min(max_len or limit, limit) + self.config.block_size
        return KVCache(
            block.layers, slots, block.kv_heads, max_len, block.head_dim, self.target.dtype, self.target.device
        )

    def context(self, taps: torch.Tensor) -> torch.Tensor:
        """Context features [B, T, H] of tapped target hidden states [B, T, K * H]."""
        return F.rms_norm(F.linear(taps, self.fc), self.norm.shape, self.hidden_norm, self.config.block.rms_eps)

    def append(self, taps: torch.Tensor, positions: torch.Tensor, cache: KVCache, slots: Slots = slice(None)) -> None:
        """Add committed target positions to the context: taps [B, T, K * H], positions int64 [B, T], -1 to skip."""
        features = self.context(taps)
        plan = cache.plan(slots, positions)
        angles = self.rope.at(positions.clamp_min(0))
        for i, layer in enumerate(self.layers):
            cache.write(i, plan, *layer.project_context(features, self.rope, angles))

    def embed_block(self, anchors: torch.Tensor) -> torch.Tensor:
        """Block inputs [..., block, H]: the embedding of the anchor tokens int64 [...], then mask embeddings."""
        table = self.target.embedding
        mask = table[self.config.mask_token_id] if self.mask_embedding is None else self.mask_embedding
        masks = mask.expand(*anchors.shape, self.config.block_size - 1, -1)
        return torch.cat((table[anchors].unsqueeze(-2), masks), -2)

    def block_hidden(
        self, anchors: torch.Tensor, starts: torch.Tensor, cache: KVCache, slots: Slots, length: int | None
    ) -> torch.Tensor:
        """Hidden states [B, block - 1, H] of the predicting slots.

        anchors int64 [B], starts int64 [B] (the anchors' positions, -1 for idle rows). The block's own keys lie in
        the cache only until the next `append` or block overwrites them. `length` exceeds every start.
        """
        size = self.config.block_size
        positions = (starts[:, None] + self._offsets).where(starts[:, None] >= 0, -1)
        safe = positions.clamp_min(0)
        plan = cache.plan(slots, positions, None if length is None else length + size)
        angles = self.rope.at(safe)
        # Context before the anchor and the whole block: everything up to the block's last position.
        allowed = safe[:, -1:, None] >= torch.arange(plan.length, device=starts.device)
        mask = additive_mask(allowed.expand(-1, size, -1), self.config.block.group, self.target.dtype)
        x = self.embed_block(anchors)
        for i, layer in enumerate(self.layers):
            queries, keys, values = layer.project(x, self.rope, angles)
            cache.write(i, plan, keys, values)
            keys, values = cache.read(i, plan)
            x = layer.finish(x, attend(queries, keys, values, mask))
        return F.rms_norm(x[:, 1:], self.norm.shape, self.norm, self.config.block.rms_eps)

    @torch.no_grad()
    def propose_greedy(
        self,
        anchors: torch.Tensor,
        starts: torch.Tensor,
        cache: KVCache,
        slots: Slots = slice(None),
        length: int | None = None,
    ) -> torch.Tensor:
        """The likeliest token of each slot by the unary logits alone, int64 [B, block - 1]."""
        hidden = self.block_hidden(anchors, starts, cache, slots, length)
        return self.target.logits(hidden).argmax(-1)

    @torch.no_grad()
    def propose_path(
        self,
        anchors: torch.Tensor,
        starts: torch.Tensor,
        cache: KVCache,
        uniforms: torch.Tensor,
        temperature: torch.Tensor | float,
        slots: Slots = slice(None),
        length: int | None = None,
    ) -> Proposal:
        """Sample a path with the selector: uniforms float64 [B, block - 1] in [0, 1), temperature > 0 (or [B])."""
        hidden = self.block_hidden(anchors, starts, cache, slots, length)
        candidates, scores = self.lattice(hidden, anchors)
        return walk(candidates, scores, uniforms, temperature)

    def lattice(self, hidden: torch.Tensor, anchors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Candidates int64 [B, S, K] and scores [B, S, K predecessors, K candidates] of hidden states [B, S, H].

        Predecessors of slot 0 are all the anchor, so its K rows are equal.
        """
        unary, candidates = self.target.logits(hidden).topk(self.config.selector_top_k, -1)
        first = anchors[:, None, None].expand(-1, 1, candidates.shape[-1])
        predecessors = self.predecessor[torch.cat((first, candidates[:, :-1]), 1)]
        keyed = predecessors * F.linear(hidden, self.projection)[:, :, None]
        return candidates, unary[:, :, None] + keyed @ self.successor[candidates].transpose(-1, -2)


def walk(
    candidates: torch.Tensor, scores: torch.Tensor, uniforms: torch.Tensor, temperature: torch.Tensor | float
) -> Proposal:
    """Draw one candidate a slot, each given the one before, by inverse CDF in float64; shapes as in `Draft.lattice`.

    No candidate without mass can be drawn: the uniform is scaled into the CDF's own total.
    """
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.double().view(-1, 1, 1, 1)
    probs = torch.softmax(scores.double() / temperature, -1)
    cdf = probs.cumsum(-1)
    total = cdf[..., -1:]
    point = (uniforms[:, :, None, None] * total).minimum(torch.nextafter(total, torch.zeros_like(total)))
    # Every predecessor's choice at once; the walk is then one gather a slot.
    choices = (point >= cdf).sum(-1)
    step = choices[:, 0, :1]
    path = [step]
    for slot in range(1, scores.shape[1]):
        step = choices[:, slot].gather(1, step)
        path.append(step)
    index = torch.stack(path, 1)
    tokens = candidates.gather(-1, index)[..., 0]
    came_from = torch.cat((torch.zeros_like(index[:, :1]), index[:, :-1]), 1)
    rows = probs.gather(2, came_from[..., None].expand(-1, -1, 1, probs.shape[-1]))[:, :, 0]
    return Proposal(tokens, candidates, rows)
