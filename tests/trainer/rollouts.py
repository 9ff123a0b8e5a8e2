"""Small models and rollouts that tests of the trainer train on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from miles_ext.law import head, law
from miles_ext.records import Commit, Completion, Status, SupportRows, Trajectory

VOCAB = 24


def make_model(
    folder: Path, *, layers: int = 2, hidden: int = 32, vocab: int = VOCAB, seed: int = 0, **changes
) -> Path:
    """A random Qwen3 as a Hugging Face folder; weights are large enough for laws that are far from uniform."""
    settings = {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": hidden // 2, "tie_word_embeddings": True,
    }  # fmt: skip
    return _random(Qwen3Config(**settings | changes), folder, seed)


def make_llama(folder: Path, *, seed: int = 0, **changes) -> Path:
    """A random Llama of two layers with an output layer of its own."""
    settings = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return _random(LlamaConfig(**settings | changes), folder, seed)


def _random(config, folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.15)
    model.save_pretrained(folder)
    return folder


def make_rollout(
    target: Path, *, groups: int = 4, samples: int = 2, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
    head_size: int = 0, noise: float = 0.0, seed: int = 0, max_tokens: int = 9, masked: bool = False,
) -> list[Trajectory]:  # fmt: skip
    """Trajectories of random tokens whose rows are the target's own laws, computed in float64.

    head_size > 0 records heads. noise: standard deviation of what is added to the logits before the law is made, the
    mismatch between engine and trainer.
    """
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).eval()
    rng = np.random.default_rng(seed)
    made = []
    for group in range(groups):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 6)).astype(np.int32)
        for _ in range(samples):
            ids, parts, chosen = prompt.tolist(), [], []
            for _ in range(int(rng.integers(2, max_tokens + 1))):
                with torch.no_grad():
                    logits = model(torch.tensor([ids])).logits[:, -1]
                logits = logits + noise * torch.from_numpy(rng.normal(size=logits.shape))
                probs = law(logits, temperature, top_k, top_p)
                token = int(rng.choice(probs.shape[1], p=probs[0].numpy() / probs[0].sum().item()))
                parts.append(_row(probs, token, head_size))
                ids.append(token)
                chosen.append(token)
            mask = np.ones(len(chosen), bool)
            if masked:
                mask[rng.integers(0, len(chosen))] = False
            made.append(_trajectory(prompt, chosen, SupportRows.concatenate(parts), group, float(rng.normal()), mask))
    return made


def _row(probs: torch.Tensor, token: int, head_size: int) -> SupportRows:
    if head_size:
        ids, logs = (array[0] for array in head(probs, head_size))
    else:
        ids = probs[0].nonzero()[:, 0]
        logs = probs[0, ids].log()
    return SupportRows(
        token_ids=ids.numpy().astype(np.int32), logprobs=logs.numpy().astype(np.float32),
        offsets=np.array([0, len(ids)]), sampled_logprobs=probs[0, token].log().numpy().astype(np.float32)[None],
        kind="head" if head_size else "complete", status=np.array([Status.OK], np.uint8),
    )  # fmt: skip


def _trajectory(prompt, chosen, support, group, reward, mask) -> Trajectory:
    completion = Completion(
        prompt_ids=prompt, response_ids=np.array(chosen, np.int32), support=support,
        commit=np.full(len(chosen), Commit.PLAIN, np.uint8), weight_version=np.zeros(len(chosen), np.int64),
        finish_reason="length",
    ).check(VOCAB)  # fmt: skip
    return Trajectory(completion=completion, prompt_id=group, group=group, reward=reward, loss_mask=mask)
