"""One model in two worlds: the tensors of a Hugging Face folder and the sharded parameters of megatron-core."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PretrainedConfig

Kind = Literal["copied", "vocabulary", "columns", "qkv", "gate_up"]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OUTSIDE: dict[str, tuple[Kind, tuple[str, ...]]] = {
    "embedding.word_embeddings.weight": ("vocabulary", (EMBEDDING,)),
    "decoder.final_layernorm.weight": ("copied", ("model.norm.weight",)),
    "output_layer.weight": ("vocabulary", (HEAD,)),
}
IN_LAYER: dict[str, tuple[Kind, tuple[str, ...]]] = {
    "input_layernorm.weight": ("copied", ("input_layernorm.weight",)),
    "self_attention.linear_qkv.weight": (
        "qkv", ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    ),
    "self_attention.q_layernorm.weight": ("copied", ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": ("copied", ("self_attn.k_norm.weight",)),
    "self_attention.linear_proj.weight": ("columns", ("self_attn.o_proj.weight",)),
    "pre_mlp_layernorm.weight": ("copied", ("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.weight": ("gate_up", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": ("columns", ("mlp.down_proj.weight",)),
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """How one parameter of `tp` shards corresponds to Hugging Face tensors. The two directions are bit-exact.

    copied: the same on every rank. vocabulary: rows, padded with zeros to a multiple of tp. columns: split in dim 1.
    qkv: for each key/value group its queries, its key, its value, one below the other, then split; where there are
    more ranks than groups the cut goes through a group, and megatron-core gathers the products. gate_up: each rank
    has its part of gate above its part of up.
    """

    kind: Kind
    names: tuple[str, ...]
    vocab: int
    groups: int
    head_dim: int
    tp: int

    def shard(self, tensors: list[torch.Tensor], rank: int) -> torch.Tensor:
        """This rank's parameter from the whole tensors in the order of `names`."""
        first = tensors[0]
        if self.kind == "copied":
            return first
        if self.kind == "columns":
            return first.chunk(self.tp, 1)[rank]
        if self.kind == "vocabulary":
            rows = padded(self.vocab, self.tp) // self.tp
            mine = first[rank * rows : (rank + 1) * rows]
            return torch.cat([mine, mine.new_zeros(rows - len(mine), mine.shape[1])])
        if self.kind == "gate_up":
            return torch.cat([tensor.chunk(self.tp)[rank] for tensor in tensors])
        by_group = torch.cat([tensor.unflatten(0, (self.groups, -1)) for tensor in tensors], 1)
        return by_group.flatten(0, 1).chunk(self.tp)[rank]

    def whole(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of `names` from the parameters of all ranks."""
        if self.kind == "copied":
            return [shards[0]]
        if self.kind == "columns":
            return [torch.cat(shards, 1)]
        if self.kind == "vocabulary":
            return [torch.cat(shards)[: self.vocab]]
        if self.kind == "gate_up":
            halves = [shard.chunk(2) for shard in shards]
            return [torch.cat([half[part] for half in halves]) for part in range(2)]
        groups = torch.cat(shards).unflatten(0, (self.groups, -1))
        sizes = (groups.shape[1] - 2 * self.head_dim, self.head_dim, self.head_dim)
        return [part.flatten(0, 1) for part in groups.split(sizes, 1)]


def layout(parameter: str, first_layer: int, config: PretrainedConfig, tp: int) -> Layout:
    """Of a parameter by its name in a stage whose layers begin at `first_layer`. KeyError for an unknown one."""
    found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", parameter)
    if found:
        kind, names = IN_LAYER[found[2]]
        names = tuple(f"model.layers.{first_layer + int(found[1])}.{name}" for name in names)
    else:
        kind, names = OUTSIDE[parameter]
        if names == (HEAD,) and config.tie_word_embeddings:  # the last stage's copy of the first stage's table
            names = (EMBEDDING,)
    return Layout(kind, names, config.vocab_size, config.num_key_value_heads, head_dim(config), tp)


def padded(vocab: int, tp: int) -> int:
    """Rows of the vocabulary over all ranks: the next multiple of tp."""
    return -(-vocab // tp) * tp


def head_dim(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
