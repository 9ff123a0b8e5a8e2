"""The embedded engine under proof: small models, a probe at the accept kernel's door, and sabotage for controls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.tasks import addition
from experiments.validate.engines import Model, Sample, Watched
from experiments.validate.models import TRAINED, make_spread
from experiments.validate.settings import Setting
from miles_ext.capability import ArmKind
from miles_ext.records import Commit, Completion, SupportRows
from miles_ext.sampling import FilterOrder, SamplingSpec
from rollout.embedded import arms, verify
from rollout.embedded.engine import EmbeddedEngine
from rollout.engine import Engine, Request
from rollout.server.app import make_app
from rollout.server.model import Model as ServedModel
from rollout.server.running import running

Logits = NDArray[np.float32]
PROMPTS = 1009  # apart from the seeds


def prompts_for(setting: Setting, count: int, model: Model, vocab: int, seed: int, tokens: int) -> list[Request]:
    """See `engines.Engines.requests`: addition problems for the trained model, random tokens for the spread one."""
    rng = np.random.default_rng(PROMPTS + seed)
    prompts: dict[bytes, NDArray[np.int32]] = {}
    while len(prompts) < count:
        if model == "trained":
            text = addition.problem(seed, 0, int(rng.integers(1 << 30))).prompt
            prompt = np.array(addition.encode(text), np.int32)
        else:
            prompt = rng.integers(0, vocab - 1, rng.integers(4, 9)).astype(np.int32)
        prompts[prompt.tobytes()] = prompt
    return [
        Request(request_id=str(i), prompt_ids=prompt, spec=setting.spec(1000 * seed + i), max_new_tokens=tokens)
        for i, prompt in enumerate(prompts.values())
    ]


class EmbeddedEngines:
    """See `engines.Engines`."""

    name = "embedded"
    arms: tuple[ArmKind, ...] = ("regular", "dflash", "dflash2")
    vocab_size = 512
    dtype = "float32"
    allow_test_verifier = False
    # Two float32 forwards of the same weights differ by about 1e-5, the law of another row by whole nats.
    trainer_gap: tuple[Literal["max", "mean"], float] = ("max", 1e-3)
    order: FilterOrder | None = None

    def __init__(self, scratch: Path) -> None:
        self.folders = {"trained": TRAINED, "spread": make_spread(scratch / "spread", self.vocab_size)}

    def target(self, model: Model) -> Path:
        return self.folders[model] / "target"

    def open(self, arm: ArmKind, model: Model = "spread", **changes: Any) -> EmbeddedEngine:
        folder = self.folders[model]
        settings = {"target": folder / "target", "max_concurrency": 64, "context_length": 128, **changes}
        return EmbeddedEngine(draft=folder / "draft", arm=arm, device="cpu", **settings)

    @contextmanager
    def watch(self, engine: Engine) -> Iterator[KernelWatch]:
        watch = KernelWatch(cast(EmbeddedEngine, engine))
        with watch.installed():
            yield watch

    def sample(self, arm: ArmKind, setting: Setting, model: Model, count: int) -> Sample:
        engine = self.open(arm, model)
        requests = self.requests(setting, count, model)
        with self.watch(engine) as watch:
            completions = engine.generate(requests)
        return Sample(setting, requests, completions, [watch.of(request) for request in requests])

    def requests(self, setting: Setting, count: int, model: Model, seed: int = 0, tokens: int = 24) -> list[Request]:
        return prompts_for(setting, count, model, self.vocab_size, seed, tokens)

    def replay(self, engine: Engine, requests: Sequence[Request]) -> list[Completion]:
        """Draws are keyed by the requests' seeds."""
        return engine.generate(requests)

    def reset(self, engine: Engine, seed: int) -> None:
        """Draws are keyed by the request's own seed."""

    @contextmanager
    def serve(self, engine: Engine, model: Model) -> Iterator[str]:
        served = cast(EmbeddedEngine, engine)
        limits = {"vocab_size": served.vocab_size, "context_length": served.context_length}
        with running(make_app(served, ServedModel(self.target(model), name="tiny", **limits))) as address:
            yield address

    def close(self) -> None:
        """Engines belong to the rows that open them."""

    @contextmanager
    def broken(self, arm: ArmKind, **changes: Any) -> Iterator[Engine]:
        engine = self.open(arm, **changes)
        kernel = arms.verify_target_only

        def redrawn(probs: Tensor, drafted: Tensor, uniforms: Tensor) -> verify.Verdict:
            verdict = kernel(probs, drafted, uniforms)
            last = verdict.counts[:, None] - 1
            again = kernel(probs, drafted, uniforms * 1009 % 1).tokens.gather(1, last)
            return verify.Verdict(verdict.tokens.scatter(1, last, again), verdict.counts)

        with patch.object(verify, "residual", lambda p, q: p), patch.object(arms, "verify_target_only", redrawn):
            yield engine
        engine.close()

    def corrupt_draft(self, engine: Engine) -> None:
        draft = cast(EmbeddedEngine, engine).draft
        assert draft is not None
        tensor = next(iter(dict(draft.private_tensors()).values()))
        bits = tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16).flatten()
        bits[0] ^= 1

    def laws(
        self, logits: Sequence[NDArray[np.float32]], specs: Sequence[SamplingSpec]
    ) -> dict[str, list[SupportRows]]:
        """Every arm decodes with the target's head replaced by the given logits; ids beyond them are forbidden."""
        found: dict[str, list[SupportRows]] = {}
        for arm in self.arms:
            engine = self.open(arm, context_length=32)
            found[arm] = []
            for row, spec in zip(logits, specs, strict=True):
                padded = torch.full((self.vocab_size,), -torch.inf)
                padded[: len(row)] = torch.from_numpy(row)
                with patch.object(
                    engine.target, "logits", lambda hidden, z=padded: z.expand(*hidden.shape[:-1], -1).clone()
                ):
                    request = Request(request_id="case", prompt_ids=np.zeros(2, np.int32), spec=spec, max_new_tokens=12)
                    support = engine.generate([request])[0].support
                assert support is not None
                found[arm].append(support)
        return found


class KernelWatch:
    """Follows cache slots, not requests: which prompt went into which slot, and every move between slots."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine
        self.by_prompt: dict[bytes, Watched] = {}
        self.in_slot: dict[int, Watched] = {}
        self.now: list[int] = []
        self.prefilling = False
        self.logits: Tensor | None = None

    def of(self, request: Request) -> Watched:
        return self.by_prompt[request.prompt_ids.astype(np.int64).tobytes()]

    @contextmanager
    def installed(self) -> Iterator[None]:
        arm, target = self.engine.arm, self.engine.target
        prefill, step, move, head = arm.prefill, arm.step, arm.move, target.logits

        def see_logits(hidden: Tensor) -> Tensor:
            self.logits = head(hidden)
            return self.logits

        def see_prefill(tokens: Tensor, positions: Tensor, last: Tensor, slots: slice) -> Tensor:
            for row, slot in enumerate(range(slots.start, slots.stop)):
                watched = Watched([], [], [], [])
                self.by_prompt[tokens[row, : int(last[row]) + 1].numpy().astype(np.int64).tobytes()] = watched
                self.in_slot[slot] = watched
            self.now, self.prefilling = list(range(slots.start, slots.stop)), True
            return prefill(tokens, positions, last, slots)

        def see_step(anchors: Tensor, starts: Tensor, slots: slice, *rest: Any) -> arms.Step:
            self.now, self.prefilling = list(range(slots.start, slots.stop)), False
            return step(anchors, starts, slots, *rest)

        def see_move(sources: Tensor, targets: Tensor, length: int) -> None:
            moved = {int(t): self.in_slot[int(s)] for s, t in zip(sources, targets, strict=True)}
            self.in_slot.update(moved)
            move(sources, targets, length)

        def see_sample(probs: Tensor, uniforms: Tensor) -> Tensor:
            seen = probs.clone()
            drawn = sample(probs, uniforms)
            self.record(seen[:, None], drawn[:, None], torch.ones_like(drawn))
            return drawn

        def see_verdict(kernel: Any) -> Any:
            def verify_block(probs: Tensor, *rest: Tensor) -> verify.Verdict:
                seen = probs.clone()
                verdict = kernel(probs, *rest)
                self.record(seen, verdict.tokens, verdict.counts)
                return verdict

            return verify_block

        sample = arms.sample
        with (
            patch.object(target, "logits", see_logits), patch.object(arm, "prefill", see_prefill),
            patch.object(arm, "step", see_step), patch.object(arm, "move", see_move),
            patch.object(arms, "sample", see_sample),
            patch.object(arms, "verify_target_only", see_verdict(arms.verify_target_only)),
            patch.object(arms, "verify_chain", see_verdict(arms.verify_chain)),
        ):  # fmt: skip
            yield

    def record(self, laws: Tensor, tokens: Tensor, counts: Tensor) -> None:
        assert self.logits is not None
        width, logits = laws.shape[1], self.logits.reshape(laws.shape).numpy()
        for row, slot in enumerate(self.now):
            count, watched = int(counts[row]), self.in_slot[slot]
            watched.tokens += tokens[row, :count].tolist()
            watched.laws += list(laws[row, :count].numpy().copy())
            watched.logits += list(logits[row, :count].copy())
            last = Commit.FULL_BONUS if count == width else Commit.REJECT_BONUS
            if self.prefilling or width == 1:
                last = Commit.PREFILL if self.prefilling else Commit.PLAIN
            watched.kinds += [int(Commit.DRAFT)] * (count - 1) + [int(last)]
