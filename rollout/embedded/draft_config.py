"""config.json of a DFlash or DFlash2 draft checkpoint, in the layout of sglang 0.5.23."""

from dataclasses import dataclass
from typing import Any

import torch

from rollout.embedded.transformer import BlockConfig

PLAIN, SELECTOR = "DFlashDraftModel", "DFlash2DraftModel"
# Fields of dflash_config that change the arithmetic and are not built here, with the value that switches them off.
REFUSED = {
    "conv_kernel_size": 0,
    "conv_group_size": 0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
    "projector_type": None,
    "attention_sink_bias": False,
    "attention_value_scale": None,
}


@dataclass(frozen=True)
class DraftConfig:
    """A draft's transformer block and how it hangs on its target."""

    block: BlockConfig
    block_size: int  # the anchor included: block_size - 1 tokens are proposed
    taps: tuple[int, ...]  # 0-based target layers whose output feeds the context
    num_target_layers: int | None
    mask_token_id: int
    mask_token: str
    selector_rank: int = 0
    selector_top_k: int = 0

    @property
    def selector(self) -> bool:
        return self.selector_rank > 0

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "DraftConfig":
        """From a parsed config.json; ValueError when it is no DFlash draft or asks for what is not built here."""
        architectures = config.get("architectures") or []
        inner = config.get("dflash_config")
        if not {PLAIN, SELECTOR} & set(architectures) or not isinstance(inner, dict):
            raise ValueError(
                f"architectures {architectures} with dflash_config {inner!r} is no supported draft; "
                f"accepted: {PLAIN} or {SELECTOR} with a dflash_config"
            )
        refused = {key: inner[key] for key, off in REFUSED.items() if inner.get(key, off) not in (off, None)}
        if config.get("is_causal") or set(config.get("layer_types") or ["full_attention"]) != {"full_attention"}:
            refused["is_causal / layer_types"] = (config.get("is_causal"), config.get("layer_types"))
        if refused:
            raise ValueError(f"the draft uses {refused}, which the embedded engine does not run; see {sorted(REFUSED)}")
        missing = [key for key in ("target_layer_ids", "mask_token_id") if inner.get(key) is None]
        block_size = inner.get("block_size", config.get("block_size"))
        if missing or not block_size or block_size < 2:
            raise ValueError(f"dflash_config misses {missing} or has block_size {block_size!r} (at least 2 is needed)")
        rank, top_k = inner.get("selector_rank") or 0, inner.get("selector_top_k") or 0
        if bool(rank) != bool(top_k) or (SELECTOR in architectures) != bool(rank):
            raise ValueError(f"selector_rank {rank} and selector_top_k {top_k} must both be set, with {SELECTOR} only")
        return cls(
            block=BlockConfig.from_hf({**config, "model_type": "qwen3"}),
            block_size=block_size,
            taps=tuple(inner["target_layer_ids"]),
            num_target_layers=inner.get("num_target_layers", config.get("num_target_layers")),
            mask_token_id=inner["mask_token_id"],
            mask_token=inner.get("mask_token") or "<|MASK|>",
            selector_rank=rank,
            selector_top_k=top_k,
        )

    def to_hf(self, dtype: torch.dtype) -> dict[str, Any]:
        """The config.json that `from_hf` and sglang read, for weights stored as `dtype`."""
        block = self.block
        inner: dict[str, Any] = {
            "mask_token": self.mask_token,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.taps),
        }
        if self.selector:
            inner |= {"selector_rank": self.selector_rank, "selector_top_k": self.selector_top_k}
        return {
            "architectures": [SELECTOR if self.selector else PLAIN],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dflash_config": inner,
            "vocab_size": block.vocab_size,
            "hidden_size": block.hidden_size,
            "intermediate_size": block.intermediate_size,
            "num_hidden_layers": block.layers,
            "num_attention_heads": block.heads,
            "num_key_value_heads": block.kv_heads,
            "head_dim": block.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": block.rms_eps,
            "rope_theta": block.rope_theta,
            "max_position_embeddings": block.max_positions,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "dtype": str(dtype).removeprefix("torch."),
        }

    def check_fits(self, target: BlockConfig) -> None:
        """ValueError naming everything that keeps this draft from serving `target`."""
        wrong = []
        for name in ("hidden_size", "vocab_size"):
            mine, theirs = getattr(self.block, name), getattr(target, name)
            if mine != theirs:
                wrong.append(f"{name} {mine} differs from the target's {theirs}")
        if self.num_target_layers not in (None, target.layers):
            wrong.append(f"num_target_layers {self.num_target_layers} differs from the target's {target.layers}")
        if not self.taps or not all(0 <= tap < target.layers for tap in self.taps):
            wrong.append(f"target_layer_ids {self.taps} are not all below the target's {target.layers} layers")
        if not 0 <= self.mask_token_id < target.vocab_size:
            wrong.append(f"mask_token_id {self.mask_token_id} is outside the target's vocabulary {target.vocab_size}")
        if self.selector_top_k > target.vocab_size:
            wrong.append(f"selector_top_k {self.selector_top_k} exceeds the target's vocabulary {target.vocab_size}")
        if wrong:
            raise ValueError("the draft does not fit its target: " + "; ".join(wrong) + "; train a draft for it")
