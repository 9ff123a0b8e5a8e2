"""Random models of a realistic size for the cost of capture: nothing of them depends on what weights say."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from experiments.models.make import initialise
from rollout.embedded.checkpoint import write_model
from rollout.embedded.decoder import Decoder
from rollout.embedded.draft import Draft
from rollout.embedded.draft_config import DraftConfig
from rollout.embedded.transformer import BlockConfig
from tests.sglang_cpu.server import TINY


@dataclass(frozen=True)
class Size:
    """A Qwen3 of this shape, tied head."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int


SIZES = {
    "135m": Size(vocabulary=49_152, hidden=576, layers=30, heads=9, kv_heads=3),
    "wide": Size(vocabulary=151_936, hidden=768, layers=12, heads=12, kv_heads=4),
}


def write_target(folder: Path, size: Size) -> Decoder:
    """Weights and a tokenizer of numbered words. Returns the decoder."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": size.vocabulary,
        "hidden_size": size.hidden, "intermediate_size": 8 * size.hidden // 3, "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads, "num_key_value_heads": size.kv_heads, "head_dim": 64, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 2048, "attention_bias": False,
        "tie_word_embeddings": True, "eos_token_id": 0, "pad_token_id": 1, "dtype": "bfloat16",
    }  # fmt: skip
    decoder = Decoder(BlockConfig.from_hf(config))
    initialise(decoder.resident_tensors(), torch.Generator().manual_seed(0))
    write_model(folder, config, {name: tensor.bfloat16() for name, tensor in decoder.named_hf_tensors()})
    words = {"<eos>": 0, "<pad>": 1, "<|MASK|>": 2, **{f"w{i}": i for i in range(3, size.vocabulary)}}
    backend = Tokenizer(WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", mask_token="<|MASK|>"
    ).save_pretrained(folder)
    return decoder


def write_draft(folder: Path, target: Decoder) -> None:
    """A DFlash draft of two layers, block 8, without a selector."""
    layers = target.config.layers
    config = DraftConfig(
        block=replace(target.config, layers=2, tied=False), block_size=8, taps=(0, layers // 2, layers - 2),
        num_target_layers=layers, mask_token_id=2, mask_token="<|MASK|>",
    )  # fmt: skip
    draft = Draft(config, target)
    initialise(draft.resident_tensors(), torch.Generator().manual_seed(1))
    draft.save_pretrained(folder, torch.bfloat16)


def vocabulary(folder: Path, name: str) -> int:
    """Of the tiny model, or of `folder`/NAME/target."""
    target = TINY / "target" if name == "tiny" else folder / name / "target"
    return json.loads((target / "config.json").read_text())["vocab_size"]


def write(folder: Path, name: str) -> None:
    """`folder`/target and `folder`/draft of a named size, once. Folders that are there are taken as they are, so a
    real model may be linked in their place."""
    if (folder / "target" / "config.json").exists():
        return
    if not (folder / "draft" / "model.safetensors").exists():
        write_draft(folder / "draft", write_target(folder / "target", SIZES[name]))
