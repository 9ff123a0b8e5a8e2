"""Random tiny checkpoints with a settled seed: a target that spreads its mass, and drafts that fit it badly or well."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from miles_ext.sampling import SamplingSpec
from rollout.embedded.decoder import Decoder
from rollout.embedded.draft import Draft
from rollout.embedded.draft_config import DraftConfig
from rollout.embedded.transformer import BlockConfig
from rollout.engine import Request

VOCAB, HIDDEN, LAYERS, POSITIONS, BLOCK = 48, 32, 2, 96, 4
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def write_target(folder: Path, seed: int = 0, model_type: str = "qwen3", gain: float = 12.0) -> Path:
    """A random target; `gain` scales the head, so that laws are neither flat nor certain."""
    torch.manual_seed(seed)
    shared = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": False,
    }
    if model_type == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**shared))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shared))
    with torch.no_grad():
        model.lm_head.weight.mul_(gain)
        for name, weight in model.named_parameters():
            if "embed" in name or "_proj" in name:
                weight.mul_(5.0)
    model.save_pretrained(folder)
    return folder


def write_draft(folder: Path, target: Path, seed: int = 1, scale: float = 0.3, selector: bool = True) -> Path:
    """A random draft: its proposals are mostly wrong, which is what exercises a verifier."""
    loaded = Decoder.from_hf(target)
    block = BlockConfig(**{**vars(loaded.config), "model_type": "qwen3", "layers": 1, "tied": False})
    config = DraftConfig(
        block=block, block_size=BLOCK, taps=(0, LAYERS - 1), num_target_layers=LAYERS, mask_token_id=VOCAB - 1,
        mask_token="<|MASK|>", selector_rank=8 if selector else 0, selector_top_k=6 if selector else 0,
    )  # fmt: skip
    draft = Draft(config, loaded)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in draft.named_hf_tensors().items():
            if "norm" in name:
                weight.fill_(1.0)
            else:
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    draft.mask_embedding = torch.randn(HIDDEN, generator=generator) * scale
    draft.save_pretrained(folder, torch.float32)
    return folder


def requests(
    count: int, *, seed: int = 0, max_new_tokens: int = 20, stop_ids: tuple[int, ...] = (), prompt: int = 0, **spec
) -> list[Request]:
    """Requests with random prompts of 1 to 9 tokens (or of `prompt` tokens) and the seeds seed, seed + 1, ..."""
    random = np.random.default_rng(seed)
    return [
        Request(
            request_id=str(i),
            prompt_ids=random.integers(0, VOCAB - 1, prompt or random.integers(1, 10)).astype(np.int32),
            spec=SamplingSpec(seed=seed + i, **spec),
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
        )
        for i in range(count)
    ]
