"""The target model: a lean decoder for Qwen3 and Llama checkpoints, with a ragged key/value cache."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from rollout.embedded.checkpoint import check_tensors, read_config, read_tensors
from rollout.embedded.kv_cache import KVCache, Slots
from rollout.embedded.transformer import BlockConfig, Layer, Rope, additive_mask, attend


class Decoder:
    """Weights and forward pass of one causal language model.

    Weights live fused in memory (`resident_tensors`) and are seen under Hugging Face names as views
    (`named_hf_tensors`); `load_hf_tensors` copies into them in place, so every holder of a reference sees an update.
    """

    def __init__(self, config: BlockConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"):
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = torch.empty(shape, dtype=dtype, device=device)
        self.head = self.embedding if config.tied else torch.empty(shape, dtype=dtype, device=device)
        self.layers = [Layer(config, dtype, device) for _ in range(config.layers)]
        self.norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self.rope = Rope(config, config.max_positions, dtype, device)

    @classmethod
    def from_hf(
        cls, path: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> "Decoder":
        """Load config.json and safetensors from a Hugging Face folder, cast to `dtype`.

        ValueError for an unsupported architecture or for missing, unknown or misshapen weights.
        """
        decoder = cls(BlockConfig.from_hf(read_config(path)), dtype, device)
        tensors = read_tensors(path)
        if decoder.config.tied:
            tensors.pop("lm_head.weight", None)
        check_tensors(tensors, dict(decoder.named_hf_tensors()), f"the checkpoint {path}")
        decoder.load_hf_tensors(tensors)
        return decoder

    def new_cache(self, slots: int, max_len: int | None = None) -> KVCache:
        """A cache for `slots` sequences of `max_len` positions (default, and at most, the model's own limit)."""
        config = self.config
        max_len = max_len or config.max_positions
        if max_len > config.max_positions:
            raise ValueError(f"max_len {max_len} exceeds max_position_embeddings {config.max_positions} of the model")
        return KVCache(config.layers, slots, config.kv_heads, max_len, config.head_dim, self.dtype, self.device)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache | None = None,
        slots: Slots = slice(None),
        length: int | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states after the final norm [B, Tq, H], and tapped ones [B, Tq, len(taps) * H] (None without taps).

        tokens, positions: int64 [B, Tq]. With a cache, keys and values are written at `positions` of `slots`
        (a slice or int64 [B]) and each query sees positions up to its own; a position outside the cache (use -1 for
        padding and finished rows) leaves no trace and its output means nothing. `length`, known to the host, must
        exceed every position that counts and bounds the work. Without a cache, rows are whole sequences in order
        and the pass is differentiable. Tap i is the residual stream after layer i.
        """
        config = self.config
        safe = positions.clamp(0, (cache.max_len if cache else config.max_positions) - 1)
        angles = self.rope.at(safe)
        if cache is None:
            allowed = positions[:, :, None] >= positions[:, None, :]
            plan = None
        else:
            plan = cache.plan(slots, positions, length)
            allowed = safe[:, :, None] >= torch.arange(plan.length, device=self.device)
        mask = additive_mask(allowed, config.group, self.dtype)
        x = self.embedding[tokens]
        tapped: dict[int, torch.Tensor] = {}
        for i, layer in enumerate(self.layers):
            queries, keys, values = layer.project(x, self.rope, angles)
            if cache is None or plan is None:
                keys, values = keys.transpose(1, 2), values.transpose(1, 2)
            else:
                cache.write(i, plan, keys, values)
                keys, values = cache.read(i, plan)
            x = layer.finish(x, attend(queries, keys, values, mask))
            if i in taps:
                tapped[i] = x
        features = torch.cat([tapped[i] for i in taps], -1) if taps else None
        return F.rms_norm(x, x.shape[-1:], self.norm, config.rms_eps), features

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of final hidden states [..., H], in the model's dtype."""
        return F.linear(hidden, self.head)

    def named_hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, view) of every weight; a tied head appears once, as the embedding."""
        yield "model.embed_tokens.weight", self.embedding
        for i, layer in enumerate(self.layers):
            yield from layer.hf_views(f"model.layers.{i}.").items()
        yield "model.norm.weight", self.norm
        if not self.config.tied:
            yield "lm_head.weight", self.head

    def resident_tensors(self) -> dict[str, torch.Tensor]:
        """Every weight as it lies in memory, fused, under the engine's own names."""
        resident = {"embedding": self.embedding, "norm": self.norm}
        for i, layer in enumerate(self.layers):
            resident.update(layer.resident(f"layers.{i}."))
        if not self.config.tied:
            resident["head"] = self.head
        return resident

    @torch.no_grad()
    def load_hf_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors, any subset of the Hugging Face names, into place with a cast to the model's dtype.

        ValueError, before anything is written, for an unknown name or a wrong shape. Whether a set of weights is
        complete is for the caller (a manifest) to say, since handoff arrives in buckets.
        """
        views = dict(self.named_hf_tensors())
        check_tensors(tensors, views, "the weights handed over", partial=True)
        for name, tensor in tensors.items():
            views[name].copy_(tensor)
