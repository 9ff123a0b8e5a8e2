"""Random tiny checkpoints with a settled seed: a target that spreads its mass and a draft that fits it badly, so that
every kind of commit occurs. Also the float64 reference of a target: transformers on the same folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from miles_ext.capability import ArmKind
from miles_ext.law import law
from miles_ext.records import Completion
from miles_ext.sampling import SamplingSpec
from rollout.embedded.decoder import Decoder
from rollout.embedded.draft import Draft
from rollout.embedded.draft_config import DraftConfig
from rollout.embedded.transformer import BlockConfig
from rollout.engine import Request

SHIPPED = Path(__file__).parents[2] / "experiments/models/tiny"
VOCAB, HIDDEN, LAYERS, POSITIONS, BLOCK = 48, 32, 2, 96, 4
ARMS: list[ArmKind] = ["regular", "dflash", "dflash2"]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def write_target(folder: Path, seed: int = 0, model_type: str = "qwen3") -> Path:
    """A random target whose laws are neither flat nor certain."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": False,
    }  # fmt: skip
    qwen = model_type == "qwen3"
    model = Qwen3ForCausalLM(Qwen3Config(**shape)) if qwen else LlamaForCausalLM(LlamaConfig(**shape))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lm_head" in name:
                weight.mul_(12.0)
            elif "embed" in name or "_proj" in name:
                weight.mul_(5.0)
    model.save_pretrained(folder)
    return folder


def write_draft(folder: Path, target: Path, seed: int = 1, selector: bool = True) -> Path:
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
            weight.copy_(torch.ones_like(weight) if "norm" in name else 0.3 * _normal(weight.shape, generator))
    draft.mask_embedding = 0.3 * _normal(torch.Size([HIDDEN]), generator)
    draft.save_pretrained(folder, torch.float32)
    return folder


def _normal(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def requests(
    count: int, *, seed: int = 0, max_new_tokens: int = 20, stop_ids: tuple[int, ...] = (), **spec: Any
) -> list[Request]:
    """Requests with random prompts of 1 to 9 tokens and the seeds seed, seed + 1, ..."""
    random = np.random.default_rng(seed)
    return [
        Request(
            request_id=str(i),
            prompt_ids=random.integers(0, VOCAB - 1, random.integers(1, 10)).astype(np.int32),
            spec=SamplingSpec(seed=seed + i, **spec),
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
        )
        for i in range(count)
    ]


class Reference:
    """Float64 laws of a checkpoint by transformers, one full forward pass a sequence."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()

    @torch.no_grad()
    def laws(self, completion: Completion, spec: SamplingSpec) -> NDArray[np.float64]:
        """[T, V]: the law of each response token."""
        ids = np.concatenate([completion.prompt_ids, completion.response_ids]).astype(np.int64)
        logits = self.model(torch.from_numpy(ids[None])).logits[0, len(completion.prompt_ids) - 1 : -1]
        return law(logits, spec.temperature, spec.top_k, spec.top_p, spec.filter_order).numpy()

    @torch.no_grad()
    def next_law(self, ids: NDArray[np.int64], spec: SamplingSpec) -> NDArray[np.float64]:
        """[V]: the law of the token that follows ids [T]."""
        logits = self.model(torch.from_numpy(ids[None])).logits[0, -1:]
        return law(logits, spec.temperature, spec.top_k, spec.top_p, spec.filter_order)[0].numpy()


def dense(completion: Completion, vocab: int) -> NDArray[np.float64]:
    """The recorded laws as [T, V]; NaN where a head says nothing."""
    rows = completion.support
    assert rows is not None
    table = np.full((len(rows), vocab), 0.0 if rows.kind == "complete" else np.nan)
    table[np.repeat(np.arange(len(rows)), rows.lengths), rows.token_ids] = np.exp(rows.logprobs.astype(np.float64))
    return table
