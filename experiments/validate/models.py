"""Small models for the proof table: the shipped pair, and a random pair whose laws spread and whose draft is poor."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from rollout.embedded.checkpoint import write_model
from rollout.embedded.decoder import Decoder
from rollout.embedded.draft import Draft
from rollout.embedded.draft_config import DraftConfig
from rollout.embedded.transformer import BlockConfig

TRAINED = Path(__file__).parents[1] / "models" / "tiny"
DRAFT_SEED = 6
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
LAYERS, HIDDEN, BLOCK, MASK = 2, 32, 4, 501


def make_spread(folder: Path, vocab: int, tokenizer_of: Path | None = None) -> Path:
    """Write folder/target and folder/draft from fixed seeds; tokenizer_of: a folder whose tokenizer is copied.

    All embeddings of the target share one direction, and the draft knows nothing but that direction: it proposes
    tokens that are likely everywhere, with probabilities that are wrong everywhere. A draft that proposed at random
    would hide a broken verifier: the residual of a token without target mass is the target's law itself.
    """
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": vocab, "hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "max_position_embeddings": 512, "attention_bias": False, "tie_word_embeddings": False, "dtype": "float32",
    }  # fmt: skip
    generator = torch.Generator().manual_seed(20)

    def noise(shape: torch.Size | tuple[int, ...], scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    shared = noise((HIDDEN,), 1.0)
    block = BlockConfig.from_hf(config)
    tensors = {}
    for name, weight in Decoder(block).named_hf_tensors():
        scale = 2.5 * HIDDEN**-0.5 if "lm_head" in name else 0.6 if "embed" in name else 0.15
        tensors[name] = torch.ones(weight.shape) if "norm" in name else noise(weight.shape, scale)
    tensors["model.embed_tokens.weight"] += shared
    write_model(folder / "target", config, tensors)
    if tokenizer_of is not None:
        for name in TOKENIZER:
            shutil.copy(tokenizer_of / name, folder / "target")

    draft_config = DraftConfig(
        block=BlockConfig(**{**vars(block), "layers": 1}), block_size=BLOCK, taps=(0,),
        num_target_layers=LAYERS, mask_token_id=MASK, mask_token="<|MASK|>", selector_rank=8, selector_top_k=6,
    )  # fmt: skip
    generator.manual_seed(DRAFT_SEED)
    draft = Draft(draft_config, Decoder.from_hf(folder / "target"))
    with torch.no_grad():
        for name, weight in draft.named_hf_tensors().items():
            weight.copy_(torch.ones(weight.shape) if "norm" in name else noise(weight.shape, 0.1))
    draft.mask_embedding = shared.clone()
    draft.save_pretrained(folder / "draft", torch.float32)
    return folder
