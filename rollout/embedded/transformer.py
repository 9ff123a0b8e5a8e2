"""The transformer block that target and draft share: RMSNorm, rotary positions, grouped attention, SwiGLU.

Weights that are multiplied with the same input are fused into one matrix (q, k, v; gate, up); `hf_views` shows them
under their Hugging Face names, as views, so that loading and exporting need no copy of their own.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

SUPPORTED = ("qwen3", "llama")


@dataclass(frozen=True)
class BlockConfig:
    """What config.json says about one architecture; `layers` counts transformer blocks."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    tied: bool
    max_positions: int

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @property
    def qk_norm(self) -> bool:
        return self.model_type == "qwen3"

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "BlockConfig":
        """From a parsed config.json; ValueError for an architecture or a feature that is not built here."""
        model_type = config.get("model_type")
        if model_type not in SUPPORTED:
            raise ValueError(f"model_type {model_type!r} is not supported; the embedded engine runs {SUPPORTED}")
        for key, plain in (("attention_bias", False), ("mlp_bias", False), ("use_sliding_window", False)):
            if config.get(key, plain) != plain:
                raise ValueError(f"{key}={config[key]!r} is not supported; the embedded engine runs models without it")
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act {config['hidden_act']!r} is not supported, only 'silu'")
        # transformers 5 keeps theta and scaling together, version 4 apart.
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise ValueError(f"rope_type {kind!r} is not supported, only 'default' and 'llama3'")
        needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        if missing := [key for key in needed if key not in config]:
            raise ValueError(f"config.json says nothing of {missing}; restore the file")
        heads = config["num_attention_heads"]
        return cls(
            model_type=model_type,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            rms_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            rope_scaling=rope if kind == "llama3" else None,
            tied=bool(config.get("tie_word_embeddings", False)),
            max_positions=config.get("max_position_embeddings", 2048),
        )


class Rope:
    """Tables of rotary cosines and sines; the sine's first half is negated so that one roll does the rotation."""

    def __init__(self, config: BlockConfig, positions: int, dtype: torch.dtype, device: torch.device | str):
        half = config.head_dim // 2
        inverse = 1.0 / config.rope_theta ** (torch.arange(half, dtype=torch.float32) * 2 / config.head_dim)
        if config.rope_scaling:
            inverse = _llama3_frequencies(inverse, config.rope_scaling)
        # Angles are float32 whatever the dtype: they are part of the model as published.
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        cos, sin = angles.to(wide).cos(), angles.to(wide).sin()
        self.cos = torch.cat((cos, cos), -1).to(dtype).to(device)[:, None]
        self.sin = torch.cat((-sin, sin), -1).to(dtype).to(device)[:, None]
        self.half = half

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines [..., 1, head_dim] at int64 positions [...], which must lie inside the table."""
        return self.cos[positions], self.sin[positions]

    def rotate(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Rotate heads x [..., heads, head_dim]."""
        cos, sin = angles
        return torch.addcmul(x * cos, x.roll(self.half, -1), sin)


def _llama3_frequencies(inverse: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """Llama 3 scaling: long wavelengths slowed by `factor`, short ones kept, a linear blend between."""
    wavelengths = 2 * torch.pi / inverse
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    blend = (rope["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    blend = blend.clamp(0, 1)
    return (1 - blend) * inverse / rope["factor"] + blend * inverse


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Grouped attention: queries [B, Tq, heads, D], keys and values [B, kv_heads, T, D], mask of `additive_mask`
    [B, 1, group * Tq, T] -> [B, Tq, heads * D].

    The query heads of a group are stacked along the query axis, so keys and values are never repeated.
    """
    batch, length, heads, dim = queries.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    stacked = queries.view(batch, length, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    stacked = stacked.reshape(batch, kv_heads, group * length, dim)
    out = F.scaled_dot_product_attention(stacked, keys, values, attn_mask=mask)
    return out.view(batch, kv_heads, group, length, dim).permute(0, 3, 1, 2, 4).reshape(batch, length, heads * dim)


def additive_mask(allowed: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    """Bool [B, Tq, T] -> [B, 1, group * Tq, T]: 0 where allowed, -inf elsewhere, repeated for stacked query heads."""
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))
    return mask.repeat(1, group, 1)[:, None]


class Layer:
    """One pre-norm transformer block with fused weights."""

    def __init__(self, config: BlockConfig, dtype: torch.dtype, device: torch.device | str):
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        hidden, dim = config.hidden_size, config.head_dim
        self.config = config
        self.input_norm = empty(hidden)
        self.qkv = empty((config.heads + 2 * config.kv_heads) * dim, hidden)
        self.qk_norm = empty(2, dim) if config.qk_norm else None
        self.o = empty(hidden, config.heads * dim)
        self.post_norm = empty(hidden)
        self.gate_up = empty(2 * config.intermediate_size, hidden)
        self.down = empty(hidden, config.intermediate_size)
        # Row of qk_norm that scales each of the heads + kv_heads normalised heads.
        self._norm_of_head = torch.tensor([0] * config.heads + [1] * config.kv_heads, device=device)

    def resident(self, prefix: str) -> dict[str, torch.Tensor]:
        """The tensors as they lie in memory, fused, under the engine's own names."""
        names = ("input_norm", "qkv", "qk_norm", "o", "post_norm", "gate_up", "down")
        return {f"{prefix}{name}": getattr(self, name) for name in names if getattr(self, name) is not None}

    def hf_views(self, prefix: str) -> dict[str, torch.Tensor]:
        """The same memory as views under Hugging Face names."""
        config = self.config
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        views = {
            "input_layernorm.weight": self.input_norm,
            "self_attn.q_proj.weight": self.qkv[:q],
            "self_attn.k_proj.weight": self.qkv[q : q + kv],
            "self_attn.v_proj.weight": self.qkv[q + kv :],
            "self_attn.o_proj.weight": self.o,
            "post_attention_layernorm.weight": self.post_norm,
            "mlp.gate_proj.weight": self.gate_up[: config.intermediate_size],
            "mlp.up_proj.weight": self.gate_up[config.intermediate_size :],
            "mlp.down_proj.weight": self.down,
        }
        if self.qk_norm is not None:
            views["self_attn.q_norm.weight"], views["self_attn.k_norm.weight"] = self.qk_norm[0], self.qk_norm[1]
        return {prefix + name: view for name, view in views.items()}

    def project(
        self, x: torch.Tensor, rope: Rope, angles: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [B, T, heads, D], keys and values [B, T, kv_heads, D] of hidden states x [B, T, H]."""
        heads, kv = self.config.heads, self.config.kv_heads
        mixed = F.linear(F.rms_norm(x, x.shape[-1:], self.input_norm, self.config.rms_eps), self.qkv)
        mixed = mixed.view(*x.shape[:-1], heads + 2 * kv, self.config.head_dim)
        turned = mixed[..., : heads + kv, :]
        if self.qk_norm is not None:
            turned = self._head_norm(turned, self.qk_norm[self._norm_of_head])
        turned = rope.rotate(turned, angles)
        return turned[..., :heads, :], turned[..., heads:, :], mixed[..., heads + kv :, :]

    def project_context(
        self, context: torch.Tensor, rope: Rope, angles: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, T, kv_heads, D] of a draft's context features [B, T, H], which no layer norm precedes."""
        heads, kv, dim = self.config.heads, self.config.kv_heads, self.config.head_dim
        mixed = F.linear(context, self.qkv[heads * dim :]).view(*context.shape[:-1], 2 * kv, dim)
        keys = mixed[..., :kv, :]
        if self.qk_norm is not None:
            keys = self._head_norm(keys, self.qk_norm[1])
        return rope.rotate(keys, angles), mixed[..., kv:, :]

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Residual stream after attention output and feed-forward; x [B, T, H], attended [B, T, heads * D]."""
        x = x + F.linear(attended, self.o)
        mixed = F.linear(F.rms_norm(x, x.shape[-1:], self.post_norm, self.config.rms_eps), self.gate_up)
        gate, up = mixed.chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)

    def _head_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], None, self.config.rms_eps) * weight
