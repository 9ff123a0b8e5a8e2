"""Makes the tiny target: supervised training on noisy worked additions, from nothing, on one CPU core."""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F

from experiments.models.sample import sample
from experiments.models.tokenizer import save_tokenizer
from experiments.tasks import addition
from rollout.embedded.checkpoint import write_model
from rollout.embedded.decoder import Decoder
from rollout.embedded.transformer import BlockConfig

STORED = torch.bfloat16
# The head is untied: an engine may then put a draft's mask embedding into the embedding's mask row, which no text
# uses, without touching a single logit.
ARCHITECTURE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": addition.VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 10,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": addition.EOS_ID,
    "pad_token_id": addition.PAD_ID,
    "dtype": str(STORED).removeprefix("torch."),
}


@dataclass(frozen=True)
class TargetRecipe:
    """Training of the target. A batch is `rows` documents of equal length; `longest` problems fill ~390 positions."""

    steps: int = 1200
    single_steps: int = 500  # steps on single problems before running sums of every length join
    rows: int = 32
    longest: int = 9
    learning_rate: float = 3e-3
    warmup: int = 50
    seed: int = 0


def initialise(tensors: Mapping[str, torch.Tensor], generator: torch.Generator) -> None:
    """Norms one, matrices normal with variance 1 / fan-in."""
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)


def cosine(step: float, steps: int, warmup: int) -> float:
    """Learning-rate factor: linear warm-up, then a cosine down to 5 %."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.525 + 0.475 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))


def batch(recipe: TargetRecipe, step: int) -> torch.Tensor:
    """Documents int64 [rows, length] of one step; long documents come in fewer rows."""
    random = Random(recipe.seed * 1_000_003 + step)
    problems = 1 if step < recipe.single_steps or step % 2 else random.randint(2, recipe.longest)
    rows = max(4, 2 * recipe.rows // (1 + problems))
    texts = [addition.document(addition.problem(recipe.seed, step, i), random, problems) for i in range(rows)]
    return torch.tensor([addition.encode(text) for text in texts])


def train_target(recipe: TargetRecipe, report: Callable[[str], None] = print) -> tuple[Decoder, list[float]]:
    """The trained decoder and its loss at every step, nats a token after the first prompt."""
    generator = torch.Generator().manual_seed(recipe.seed)
    decoder = Decoder(BlockConfig.from_hf(ARCHITECTURE))
    initialise(decoder.resident_tensors(), generator)
    weights = list(decoder.resident_tensors().values())
    for weight in weights:
        weight.requires_grad_()
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.01, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: cosine(s, recipe.steps, recipe.warmup))
    prompt = len(addition.problem(0, 0, 0).prompt)
    losses = []
    for step in range(recipe.steps):
        tokens = batch(recipe, step)
        positions = torch.arange(tokens.shape[1] - 1).expand(tokens.shape[0], -1)
        hidden, _ = decoder.forward(tokens[:, :-1], positions)
        logits = decoder.logits(hidden[:, prompt - 1 :])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, prompt:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 100 == 99:
            report(f"target step {step + 1}/{recipe.steps} loss {sum(losses[-100:]) / 100:.4f}")
    for weight in weights:
        weight.requires_grad_(False).copy_(weight.to(STORED))
    return decoder, losses


def accuracy(decoder: Decoder, count: int, seed: int) -> float:
    """Mean reward of one response at temperature 1 to each of `count` held-out problems."""
    questions = [addition.problem(seed, 0, i, "held_out") for i in range(count)]
    prompts = torch.tensor([addition.encode(question.prompt) for question in questions])
    texts = sample(decoder, prompts, addition.RESPONSE_LENGTH, torch.Generator().manual_seed(seed))
    responses = texts.tokens[:, prompts.shape[1] :].tolist()
    rewards = [addition.reward(q.prompt, response) for q, response in zip(questions, responses, strict=True)]
    return sum(rewards) / count


def save_target(decoder: Decoder, folder: str | Path) -> None:
    """Write the Hugging Face folder: weights in bfloat16, config, tokenizer files."""
    write_model(folder, ARCHITECTURE, {name: tensor.to(STORED) for name, tensor in decoder.named_hf_tensors()})
    save_tokenizer(folder)


def main(argv: Sequence[str] | None = None) -> None:
    """`models make`: train the tiny target and write it."""
    recipe = TargetRecipe()
    parser = argparse.ArgumentParser(prog="models make", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    for field in fields(recipe):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # sums then have one order: a rerun on the same machine gives the same bytes
    decoder, _ = train_target(replace(recipe, **{field.name: getattr(args, field.name) for field in fields(recipe)}))
    save_target(decoder, args.out)
    print(f"held-out reward at temperature 1: {accuracy(decoder, 512, args.seed):.3f}; written to {args.out}")


if __name__ == "__main__":
    main()
