"""Distils a DFlash2 draft from any supported target, on text that the target itself samples at temperature 1.

One checkpoint serves both arms: `dflash` proposes by its unary logits, `dflash2` samples paths with its selector. Both
are fitted by cross entropy to the target's own law at every slot of blocks that start at random anchors. The selector
sees the true previous token (teacher forcing), the unary logits see only the anchor, so they learn the marginal law.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from experiments.models.accept import accept_length
from experiments.models.make import cosine, initialise
from experiments.models.sample import sample
from experiments.tasks import addition
from rollout.embedded.decoder import Decoder
from rollout.embedded.draft import Draft
from rollout.embedded.draft_config import DraftConfig
from rollout.embedded.transformer import additive_mask, attend

STORED = torch.bfloat16
PROMPT_SEED = 77  # apart from the small seeds that experiments give their own problems


@dataclass(frozen=True)
class DraftRecipe:
    """Training of a draft. A round samples `rows` fresh texts of `new_tokens` and takes `round_steps` steps on them."""

    rounds: int = 10
    round_steps: int = 200
    rows: int = 160
    new_tokens: int = 290
    batch_rows: int = 8
    anchors: int = 16
    block_size: int = 8
    layers: int = 2
    group: int = 4  # query heads a key/value head, where the target has fewer: one block looks many ways at once
    taps: int = 4  # target layers that feed the context, evenly spaced from the first to the last but one
    selector_rank: int = 32
    selector_top_k: int = 8
    learning_rate: float = 3e-3
    warmup: int = 50
    decay: float = 4.0  # slot j weighs exp(-j / decay): a late slot counts only when all before it were accepted
    mask_token_id: int = addition.MASK_ID
    seed: int = 0


def new_draft(target: Decoder, recipe: DraftRecipe) -> Draft:
    """An untrained draft shaped like its target's layers."""
    shape, layers = target.config, target.config.layers
    heads = shape.kv_heads * max(shape.group, recipe.group)
    # sglang taps a layer at the input of the next one, so the last layer itself cannot be tapped there.
    taps = tuple(sorted({round(i * (layers - 2) / (recipe.taps - 1)) for i in range(recipe.taps)}))
    config = DraftConfig(
        block=replace(shape, model_type="qwen3", layers=recipe.layers, heads=heads, tied=False, rope_scaling=None),
        block_size=recipe.block_size,
        taps=taps,
        num_target_layers=layers,
        mask_token_id=recipe.mask_token_id,
        mask_token="<|MASK|>",
        selector_rank=recipe.selector_rank,
        selector_top_k=recipe.selector_top_k,
    )
    draft = Draft(config, target)
    draft.mask_embedding = torch.empty_like(draft.norm)
    initialise(draft.resident_tensors(), torch.Generator(target.device).manual_seed(recipe.seed))
    # The selector starts as a small correction to the unary logits.
    draft.predecessor *= 0.5
    draft.successor *= 0.5
    return draft


def blocks_hidden(draft: Draft, tokens: torch.Tensor, taps: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """Differentiable hidden states [B, A, block - 1, H] of the blocks at anchor positions int64 [B, A].

    tokens int64 [B, T]; taps [B, T', K * H] of positions 0 .. T' - 1. The same arithmetic as the engine's cached pass.
    """
    rows, count = anchors.shape
    size = draft.config.block_size
    seen = torch.arange(taps.shape[1], device=taps.device)
    own = torch.arange(count * size, device=taps.device) // size
    positions = (anchors[:, :, None] + torch.arange(size, device=taps.device)).flatten(1)
    before = seen < anchors.repeat_interleave(size, 1)[:, :, None]
    within = (own[:, None] == own).expand(rows, -1, -1)
    block = draft.config.block
    mask = additive_mask(torch.cat((before, within), -1), block.group, taps.dtype)
    features = draft.context(taps)
    context_angles, angles = draft.rope.at(seen.expand(rows, -1)), draft.rope.at(positions)
    x = draft.embed_block(tokens.gather(1, anchors)).flatten(1, 2)
    for layer in draft.layers:
        context_keys, context_values = layer.project_context(features, draft.rope, context_angles)
        queries, keys, values = layer.project(x, draft.rope, angles)
        keys = torch.cat((context_keys, keys), 1).transpose(1, 2)
        values = torch.cat((context_values, values), 1).transpose(1, 2)
        x = layer.finish(x, attend(queries, keys, values, mask))
    x = F.rms_norm(x, draft.norm.shape, draft.norm, block.rms_eps)
    return x.unflatten(1, (count, size))[:, :, 1:]


def block_loss(
    draft: Draft, tokens: torch.Tensor, taps: torch.Tensor, law: torch.Tensor, anchors: torch.Tensor, decay: float
) -> torch.Tensor:
    """Unary plus selector cross entropy to the target's law [B, A, block - 1, V], nats, weighted over slots."""
    hidden = blocks_hidden(draft, tokens, taps, anchors)
    slots = torch.arange(draft.config.block_size - 1, device=hidden.device)
    previous = tokens.gather(1, (anchors[:, :, None] + slots).flatten(1)).view(hidden.shape[:-1])
    unary = draft.target.logits(hidden)
    edges = (draft.predecessor[previous] * F.linear(hidden, draft.projection)) @ draft.successor.T
    weights = torch.exp(-slots / decay)
    cross = sum(-(law * torch.log_softmax(scores, -1)).sum(-1) for scores in (unary, unary + edges))
    assert isinstance(cross, torch.Tensor)
    return (cross * weights).mean((0, 1)).sum() / weights.sum()


def train_draft(
    target: Decoder,
    prompts: Callable[[int], torch.Tensor],
    recipe: DraftRecipe,
    report: Callable[[str], None] = print,
) -> tuple[Draft, list[float]]:
    """The trained draft and its loss at every step. `prompts(round)` gives equally long prompts int64 [rows, P]."""
    draft = new_draft(target, recipe)
    weights = list(draft.resident_tensors().values())
    for weight in weights:
        weight.requires_grad_()
    total = recipe.rounds * recipe.round_steps
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.01, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: cosine(s, total, recipe.warmup))
    device = target.device
    generator = torch.Generator(device).manual_seed(recipe.seed)
    losses = []
    for index in range(recipe.rounds):
        start = prompts(index).to(device)
        texts, taps, hidden = sample(target, start, recipe.new_tokens, generator, taps=draft.config.taps)
        # The first anchor is the first sampled token; the last block must lie inside the text.
        low, high = start.shape[1], texts.shape[1] - recipe.block_size
        for _ in range(recipe.round_steps):
            rows = torch.randint(texts.shape[0], (recipe.batch_rows,), generator=generator, device=device)
            # Squared: the early part of a response, which every response has, is seen more often than the late one.
            where = torch.rand(recipe.batch_rows, recipe.anchors, generator=generator, device=device).square()
            anchors = low + (where * (high + 1 - low)).long()
            slots = (anchors[:, :, None] + torch.arange(recipe.block_size - 1, device=device)).flatten(1)
            state = hidden[rows].gather(1, slots[..., None].expand(-1, -1, hidden.shape[-1]))
            law = torch.softmax(target.logits(state), -1).unflatten(1, (recipe.anchors, -1))
            loss = block_loss(draft, texts[rows], taps[rows], law, anchors, recipe.decay)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        report(f"draft step {len(losses)}/{total} loss {sum(losses[-recipe.round_steps :]) / recipe.round_steps:.4f}")
    for weight in weights:
        weight.requires_grad_(False).copy_(weight.to(STORED))
    return draft, losses


def addition_prompts(rows: int, seed: int, split: addition.Split) -> Callable[[int], torch.Tensor]:
    """Prompts int64 [rows, 8] of the addition task, by round."""

    def prompts(index: int) -> torch.Tensor:
        questions = [addition.problem(seed, index, row, split) for row in range(rows)]
        return torch.tensor([addition.encode(question.prompt) for question in questions])

    return prompts


def file_prompts(file: Path, target: Path, rows: int) -> Callable[[int], torch.Tensor]:
    """Prompts from a file, one a line, in turn; those of one round are cut to the shortest of them."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    lines = [ids for line in file.read_text().splitlines() if (ids := tokenizer(line)["input_ids"])]
    if not lines:
        raise ValueError(f"{file} holds no prompt; give one prompt a line")

    def prompts(index: int) -> torch.Tensor:
        chosen = [lines[(index * rows + row) % len(lines)] for row in range(rows)]
        shortest = min(map(len, chosen))
        return torch.tensor([ids[:shortest] for ids in chosen])

    return prompts


def main(argv: Sequence[str] | None = None) -> None:
    """`models train-draft`: train a draft for a target folder, write it, print its held-out accept length."""
    recipe = DraftRecipe()
    parser = argparse.ArgumentParser(prog="models train-draft", description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="Hugging Face folder of a Qwen3 or Llama model")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--prompts", type=Path, help="text file, one prompt a line (default: the addition task)")
    parser.add_argument("--held-out", type=Path, help="prompts for the accept length (default: those of training)")
    for field in fields(recipe):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    parser.add_argument("--threads", type=int, default=1, help="with 1, a rerun on one machine gives the same bytes")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    target = Decoder.from_hf(args.target, args.device)
    recipe = replace(recipe, **{field.name: getattr(args, field.name) for field in fields(recipe)})
    if args.prompts:
        prompts = file_prompts(args.prompts, args.target, recipe.rows)
        held_out = file_prompts(args.held_out or args.prompts, args.target, 64)(0)
    elif target.config.vocab_size == addition.VOCAB_SIZE:
        prompts = addition_prompts(recipe.rows, PROMPT_SEED + recipe.seed, "train")
        held_out = addition_prompts(64, PROMPT_SEED + recipe.seed, "held_out")(0)
    else:
        raise ValueError(f"{args.target} is no model of the addition task; give it prompts with --prompts FILE")
    draft, _ = train_draft(target, prompts, recipe)
    draft.save_pretrained(args.out, STORED)
    for selector, arm in ((False, "dflash"), (True, "dflash2")):
        generator = torch.Generator(target.device).manual_seed(recipe.seed)
        length = accept_length(draft, held_out.to(target.device), recipe.new_tokens, generator, selector)
        print(f"held-out accept length, {arm}, {recipe.new_tokens} tokens at temperature 1: {length:.2f}")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
