"""Distils a DFlash2 draft from any supported target, on text that the target itself samples at temperature 1.

One checkpoint serves both arms: `dflash` proposes by its unary logits, `dflash2` samples paths with its selector. Both
are fitted by cross entropy to the target's own law at every slot of blocks that start at random anchors. The selector
sees the true previous token (teacher forcing), the unary logits see only the anchor, so they learn the marginal law.
An interrupted training goes on from its last round when the same command is given again.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from experiments.models.accept import accept_length
from experiments.models.distil import block_loss, lesson
from experiments.models.make import cosine, initialise
from experiments.models.prompts import Source, addition_source, chat_source, line_source
from experiments.models.sample import Texts, sample
from experiments.tasks import addition
from rollout.embedded.decoder import Decoder
from rollout.embedded.draft import Draft
from rollout.embedded.draft_config import DraftConfig

STORED = torch.bfloat16
PROMPT_SEED = 77  # apart from the small seeds that experiments give their own problems
STATE_FILE = "training.pt"


@dataclass(frozen=True)
class DraftRecipe:
    """Training of a draft. A round samples `rows` fresh texts of `new_tokens` and takes `round_steps` steps on them."""

    rounds: int = 10
    round_steps: int = 200
    seconds: float = 0.0  # training ends with the rounds or after so long, whichever is first; 0: with the rounds
    rows: int = 160
    new_tokens: int = 290
    batch_rows: int = 8
    anchors: int = 16
    early: float = 2.0  # anchors lie at u^early of a response, u uniform: above 1 its beginning is seen more often
    block_size: int = 8
    small_block: int = 0  # every other step trains blocks of this size, so that the draft serves with either; 0: none
    layers: int = 2
    group: int = 4  # query heads a key/value head, where the target has fewer: one block looks many ways at once
    taps: int = 4  # target layers that feed the context, evenly spaced from the first to the last but one
    selector_rank: int = 32
    selector_top_k: int = 8
    learning_rate: float = 3e-3
    warmup: int = 50
    decay: float = 4.0  # slot j weighs exp(-j / decay): a late slot counts only when all before it were accepted
    acceptance: float = 0.0  # weight of the expected share of accepted slots beside the cross entropies
    mask_token_id: int = addition.MASK_ID
    seed: int = 0


def new_draft(target: Decoder, recipe: DraftRecipe, mask_token: str = "<|MASK|>") -> Draft:
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
        mask_token=mask_token,
        selector_rank=recipe.selector_rank,
        selector_top_k=recipe.selector_top_k,
    )
    draft = Draft(config, target)
    draft.mask_embedding = torch.empty_like(draft.norm)
    initialise(draft.resident_tensors(), torch.Generator(target.device).manual_seed(recipe.seed))
    # The selector starts as a small correction to the unary logits.
    draft.predecessor *= 0.5
    draft.successor *= 0.5
    draft.norm.copy_(target.norm)  # what the head reads
    return draft


class Weights:
    """A draft's weights as the optimizer has them: float32, where the draft itself may compute in fewer bits."""

    def __init__(self, draft: Draft) -> None:
        self.live = list(draft.resident_tensors().values())
        for weight in self.live:
            weight.requires_grad_()
        # Their own memory in any case: a resumed training starts from what is exact in float32.
        self.masters = [weight.detach().float().clone().requires_grad_() for weight in self.live]

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Gradients of the loss on the masters, clipped to norm 1; their norm before."""
        for master, gradient in zip(self.masters, torch.autograd.grad(loss, self.live, allow_unused=True), strict=True):
            master.grad = torch.zeros_like(master) if gradient is None else gradient.float()
        return torch.nn.utils.clip_grad_norm_(self.masters, 1.0)

    @torch.no_grad()
    def publish(self) -> None:
        for weight, master in zip(self.live, self.masters, strict=True):
            weight.copy_(master)

    @torch.no_grad()
    def freeze(self, draft: Draft, scale: torch.Tensor) -> None:
        """Fold the scale of the taps into the weights that read them, round to what is stored, and stop learning."""
        next(master for weight, master in zip(self.live, self.masters, strict=True) if weight is draft.fc).div_(scale)
        for weight, master in zip(self.live, self.masters, strict=True):
            weight.requires_grad_(False).copy_(master.to(STORED))


def tap_scale(texts: Texts) -> torch.Tensor:
    """Root mean square of each tapped channel over the texts, float32 [K * H].

    A few channels of a language model are a hundred times larger than the rest. Training sees all of them at size one.
    """
    read = texts.hidden.abs().sum(-1) > 0
    read[:, 0] = False  # the first position is an attention sink, far larger still
    total = sum(row[mask].float().pow(2).sum(0) for row, mask in zip(texts.taps, read, strict=True))
    assert isinstance(total, torch.Tensor)
    return (total / read.sum()).sqrt().clamp_min(1e-6)


def response_ends(texts: Texts, new_tokens: int, stop: int | None) -> torch.Tensor:
    """Position after the last token of each response int64 [B], its stop token included."""
    positions = torch.arange(texts.tokens.shape[1], device=texts.tokens.device)
    limit = texts.prompt_lengths + new_tokens
    if stop is None:
        return limit
    stopped = (texts.tokens == stop) & (positions >= texts.prompt_lengths[:, None])
    first = torch.where(stopped, positions, len(positions)).amin(1) + 1
    return torch.maximum(first.minimum(limit), texts.prompt_lengths + 2)  # one slot at least to learn from


def train_draft(
    target: Decoder,
    source: Source,
    recipe: DraftRecipe,
    report: Callable[[dict[str, float]], None] = lambda figures: print(_line(figures), flush=True),
    state: Path | None = None,
    mask_token: str = "<|MASK|>",
) -> tuple[Draft, list[float]]:
    """The trained draft and its loss at every step. With `state`, a file written after every round, it resumes."""
    draft = new_draft(target, recipe, mask_token)
    sizes = [recipe.block_size, recipe.small_block or recipe.block_size]
    views = [draft.resized(size) for size in sizes]
    weights, total, device = Weights(draft), recipe.rounds * recipe.round_steps, target.device
    optimizer = torch.optim.AdamW(weights.masters, lr=recipe.learning_rate, weight_decay=0.01, betas=(0.9, 0.99))
    generator = torch.Generator(device).manual_seed(recipe.seed)
    losses: list[float] = []
    done, spent, scale = 0, 0.0, torch.ones(())
    if state is not None and state.is_file():
        saved = torch.load(state, map_location="cpu", weights_only=True)
        if saved["recipe"] != asdict(recipe):
            raise ValueError(f"{state} is of another recipe; give the same settings to go on with it, or remove it")
        with torch.no_grad():
            for master, values in zip(weights.masters, saved["masters"], strict=True):
                master.copy_(values)
        optimizer.load_state_dict(saved["optimizer"])
        generator.set_state(saved["generator"])
        losses, done, spent, scale = (saved[name] for name in ("losses", "round", "seconds", "scale"))
        scale = scale.to(device)
        weights.publish()
    began = time.perf_counter() - spent

    def progress() -> float:
        """Share of the training that is behind, by steps or by the clock."""
        clock = (time.perf_counter() - began) / recipe.seconds if recipe.seconds else 0.0
        return max(len(losses) / total, clock)

    for index in range(done, recipe.rounds):
        if progress() >= 1.0:
            break
        prompts, lengths = (tensor.to(device) for tensor in source.batch(index))
        texts = sample(target, prompts, recipe.new_tokens, generator, 1.0, draft.config.taps, lengths)
        scale = tap_scale(texts) if index == 0 else scale
        texts = texts._replace(taps=texts.taps.div_(scale.to(texts.taps.dtype)))
        ends = response_ends(texts, recipe.new_tokens, source.stop)
        sampled = time.perf_counter() - began
        sums = torch.zeros(3, device=device)
        steps = 0
        while steps < recipe.round_steps and (at := progress()) < 1.0:
            view = views[len(losses) % 2]
            rows = torch.randint(prompts.shape[0], (recipe.batch_rows,), generator=generator, device=device)
            where = torch.rand(recipe.batch_rows, recipe.anchors, generator=generator, device=device)
            given = lesson(view, texts, ends, rows, where.pow(recipe.early))
            loss, length = block_loss(view, given, recipe.decay, recipe.acceptance)
            norm = weights.backward(loss)
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * cosine(at * total, total, recipe.warmup)
            optimizer.step()
            weights.publish()
            sums += torch.stack((loss.detach(), length, norm))
            losses.append(loss.item())
            steps += 1
        mean = (sums / max(1, steps)).tolist()
        if state is not None:
            state.parent.mkdir(parents=True, exist_ok=True)
            kept = {
                "recipe": asdict(recipe), "masters": weights.masters, "optimizer": optimizer.state_dict(),
                "generator": generator.get_state(), "losses": losses, "round": index + 1, "scale": scale,
                "seconds": time.perf_counter() - began,
            }  # fmt: skip
            torch.save(kept, state.with_suffix(".new"))
            state.with_suffix(".new").replace(state)
        report(
            {
                "round": index + 1, "step": len(losses), "loss": mean[0], "expected_accept_length": mean[1],
                "grad_norm": mean[2], "tokens_of_a_response": float((ends - texts.prompt_lengths).float().mean()),
                "sampled_at_s": sampled, "seconds": time.perf_counter() - began,
            }
        )  # fmt: skip
    weights.freeze(draft, scale.to(device))
    return draft, losses


def _line(figures: dict[str, float]) -> str:
    return "draft " + "  ".join(f"{name} {value:.4g}" for name, value in figures.items())


class Log:
    """Figures of each round to the terminal, `training.jsonl` and Weights & Biases."""

    def __init__(self, folder: Path, mode: Literal["disabled", "offline", "online"], config: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "training.jsonl").open("a")
        self._run = None
        if mode != "disabled":
            import wandb

            self._run = wandb.init(
                project="score-centering",
                job_type="train-draft",
                name=folder.name,
                dir=folder,
                mode=mode,
                config=config,
            )

    def __call__(self, figures: dict[str, float]) -> None:
        print(_line(figures), flush=True)
        self._file.write(json.dumps(figures) + "\n")
        self._file.flush()
        if self._run is not None:
            self._run.log(figures)

    def close(self) -> None:
        self._file.close()
        if self._run is not None:
            self._run.finish()


def accept_lengths(draft: Draft, source: Source, recipe: DraftRecipe) -> Iterator[tuple[str, float]]:
    """Held-out accept length of both arms, at every block size that was trained."""
    prompts, lengths = (tensor.to(draft.target.device) for tensor in source.held_out)
    for size in sorted({recipe.block_size, recipe.small_block or recipe.block_size}):
        for selector, arm in ((False, "dflash"), (True, "dflash2")):
            generator = torch.Generator(draft.target.device).manual_seed(recipe.seed)
            view = draft.resized(size)
            yield (
                f"accept_length/{arm}/block_{size}",
                accept_length(view, prompts, recipe.new_tokens, generator, selector, lengths, source.stop),
            )


def make_source(args: argparse.Namespace, recipe: DraftRecipe, target: Decoder) -> Source:
    if args.chat:
        held_out = args.held_out or args.chat
        return chat_source(args.chat, held_out, args.preamble, args.target, recipe.rows, args.held_out_rows)
    if args.prompts:
        return line_source(args.prompts, args.held_out or args.prompts, args.target, recipe.rows, args.held_out_rows)
    if target.config.vocab_size == addition.VOCAB_SIZE:
        return addition_source(recipe.rows, args.held_out_rows, PROMPT_SEED + recipe.seed)
    raise ValueError(f"{args.target} is no model of the addition task; give it prompts with --chat or --prompts FILE")


def main(argv: Sequence[str] | None = None) -> None:
    """`models train-draft`: train a draft for a target folder, write it, print its held-out accept length."""
    recipe = DraftRecipe()
    parser = argparse.ArgumentParser(prog="models train-draft", description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="Hugging Face folder of a Qwen3 or Llama model")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--prompts", type=Path, help="text file, one prompt a line (default: the addition task)")
    parser.add_argument("--chat", type=Path, help="JSON lines with a `question` each, asked in the chat template")
    parser.add_argument("--preamble", type=Path, help="JSON list of chat messages before every question of --chat")
    parser.add_argument("--held-out", type=Path, help="the same kind of file for the accept length (default: that one)")
    parser.add_argument("--held-out-rows", type=int, default=64, help="prompts for the accept length")
    for field in fields(recipe):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    parser.add_argument("--mask-token", default="<|MASK|>", help="the name of mask_token_id in the target's tokenizer")
    parser.add_argument("--threads", type=int, default=1, help="with 1, a rerun on one machine gives the same bytes")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the computation")
    parser.add_argument("--wandb-mode", default="disabled", choices=("disabled", "offline", "online"))
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    target = Decoder.from_hf(args.target, args.device, getattr(torch, args.dtype))
    recipe = replace(recipe, **{field.name: getattr(args, field.name) for field in fields(recipe)})
    source = make_source(args, recipe, target)
    log = Log(args.out, args.wandb_mode, asdict(recipe) | {"target": str(args.target)})
    draft, _ = train_draft(target, source, recipe, log, args.out / STATE_FILE, args.mask_token)
    draft.save_pretrained(args.out, STORED)
    Draft.from_pretrained(args.out, target)  # strict: every weight is there
    found = dict(accept_lengths(draft, source, recipe))
    log(found)
    log.close()
    (args.out / "accept.json").write_text(json.dumps({"recipe": asdict(recipe), **found}, indent=2) + "\n")
    (args.out / STATE_FILE).unlink()
    for name, length in found.items():
        arm, block = name.split("/")[1:]
        print(f"held-out accept length, {arm}, {block}, {recipe.new_tokens} tokens at temperature 1: {length:.2f}")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
