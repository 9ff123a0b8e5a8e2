"""`bench rollout`: what speculation gains, what capture costs, and how the plain engine stands beside `generate`.

One workload: eight additions decoded at once for 256 tokens each, stop ids ignored (the model then runs on through
a running sum, which is what it was trained on). Engines take turns inside each repeat. Time is processor seconds of
one torch thread on a CPU, which other load on the machine hardly stretches, and synchronised wall time on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from experiments.evidence import Row, at_least, at_most, report
from experiments.tasks import addition
from miles_ext.capability import ArmKind
from miles_ext.sampling import SamplingSpec
from rollout.embedded.engine import EmbeddedEngine
from rollout.engine import Request

MODELS = Path(__file__).parents[1] / "models" / "tiny"
ARMS: tuple[ArmKind, ...] = ("regular", "dflash", "dflash2")
RESPONSES, LENGTH = 8, 256
PLAIN = SamplingSpec(capture="off")
FILTERED = SamplingSpec(top_k=50, top_p=0.95, capture="off")
# Name of a capture -> (the spec that records, the same law unrecorded).
CAPTURES: dict[str, tuple[SamplingSpec, SamplingSpec]] = {
    "k32": (replace(PLAIN, capture="head", head_size=32), PLAIN),
    "k128": (replace(PLAIN, capture="head", head_size=128), PLAIN),
    "filtered": (replace(FILTERED, capture="complete"), FILTERED),
}


@dataclass(frozen=True)
class Run:
    """One timed batch. accept_length: committed tokens a live step, the prefill token left out."""

    arm: str
    spec: SamplingSpec
    repeat: int
    tokens_per_s: float
    accept_length: float


def requests(spec: SamplingSpec, repeat: int, responses: int = RESPONSES, length: int = LENGTH) -> list[Request]:
    """The workload of one repeat: the same prompts and seeds for every arm and capture."""
    return [
        Request(
            request_id=f"{repeat}-{i}",
            prompt_ids=np.array(addition.encode(addition.problem(0, repeat, i, "held_out").prompt), np.int32),
            spec=replace(spec, seed=1000 * repeat + i),
            max_new_tokens=length,
        )
        for i in range(responses)
    ]


def measure(
    engines: Mapping[ArmKind, EmbeddedEngine], specs: Sequence[SamplingSpec], repeats: int, length: int = LENGTH
) -> list[Run]:
    """Every engine on every spec, `repeats` times, taking turns; one untimed round first."""
    runs = []
    for repeat in range(-1, repeats):
        for spec in specs if repeat % 2 else specs[::-1]:
            for arm, engine in engines.items():
                wanted = requests(spec, max(repeat, 0), length=length)
                seconds, done = _timed(
                    lambda engine=engine, wanted=wanted: engine.generate(wanted), engine.target.device
                )
                tokens, steps = sum(map(len, done)), sum(one.spec.live_steps for one in done)
                runs.append(Run(arm, spec, repeat, tokens / seconds, (tokens - len(done)) / steps))
    return [run for run in runs if run.repeat >= 0]


def capture_loss(
    engines: Sequence[EmbeddedEngine], on: SamplingSpec, off: SamplingSpec, repeat: int, length: int = LENGTH
) -> float:
    """Fraction of tokens/s that recording costs: 1 - (tokens/s on) / (tokens/s off), of the same responses.

    Two engines decode the workload step by step in turns, one of them recording, so that what else the machine does
    falls on both alike. Building the completions is part of the time.
    """
    sessions = [
        engine.start(requests(spec, repeat, length=length)) for engine, spec in zip(engines, (on, off), strict=True)
    ]
    device = engines[0].target.device
    spent, done = [0.0, 0.0], [[], []]
    while any(session.batch.unfinished for session in sessions):
        for i, session in enumerate(sessions):
            seconds, _ = _timed(session.advance, device)
            spent[i] += seconds
    for i, (engine, session) in enumerate(zip(engines, sessions, strict=True)):
        seconds, done[i] = _timed(lambda engine=engine, session=session: engine.finish(session), device)
        spent[i] += seconds
    if any(a.response_ids.tolist() != b.response_ids.tolist() for a, b in zip(*done, strict=True)):
        raise RuntimeError("recording changed a response: the two speeds cannot be compared")
    return 1 - spent[1] / spent[0]


def load_engines(device: str = "auto", models: Path = MODELS) -> dict[ArmKind, EmbeddedEngine]:
    return {
        arm: EmbeddedEngine(models / "target", models / "draft", arm, device=device, max_concurrency=RESPONSES)
        for arm in ARMS
    }


def beside_generate(engine: EmbeddedEngine, repeats: int, models: Path = MODELS) -> dict[str, list[float]]:
    """Tokens/s of the regular engine and, taking turns with it, of stock transformers `generate` on the same weights,
    batch, lengths and law, with its static and its dynamic cache."""
    from transformers import AutoModelForCausalLM

    device = engine.target.device
    model: Any = AutoModelForCausalLM.from_pretrained(models / "target", dtype=torch.float32)
    model = model.to(device).eval()
    settings = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=None, pad_token_id=0)
    settings |= dict(max_new_tokens=LENGTH, min_new_tokens=LENGTH)
    found: dict[str, list[float]] = {"engine": [], "static": [], "dynamic": []}
    for repeat in range(-1, repeats):
        wanted = requests(PLAIN, max(repeat, 0))
        ids = torch.from_numpy(np.stack([one.prompt_ids for one in wanted]).astype(np.int64)).to(device)
        for name, speeds in found.items():
            if name == "engine":
                seconds, _ = _timed(lambda wanted=wanted: engine.generate(wanted), device)
            else:
                inputs = {"attention_mask": torch.ones_like(ids), "cache_implementation": name, **settings}
                seconds, out = _timed(lambda ids=ids, inputs=inputs: model.generate(ids, **inputs), device)
                if out.shape[1] != ids.shape[1] + LENGTH:
                    raise RuntimeError(f"generate stopped after {out.shape[1] - ids.shape[1]} of {LENGTH} tokens")
            if repeat >= 0:
                speeds.append(LENGTH * len(wanted) / seconds)
    return found


def rows(quick: bool = False) -> list[dict[str, Any]]:
    """Measure and judge; `quick` takes fewer repeats."""
    repeats = 3 if quick else 5
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        engines = load_engines()
        runs = measure(engines, [PLAIN, *(on for on, _ in CAPTURES.values())], repeats)
        losses = _capture(repeats)
        stock = beside_generate(engines["regular"], repeats)
    finally:
        torch.set_num_threads(threads)
    return [row.as_json() for row in [*_speed(runs), *losses, _generate(stock)]]


def _speed(runs: list[Run]) -> list[Row]:
    found = []
    for name, (spec, _) in CAPTURES.items():
        for arm in ("dflash2", "dflash"):
            ratios = _paired(runs, (arm, spec), ("regular", spec))
            detail = f"{_range(ratios)}; tokens/s {_absolute(runs, arm, spec)} over {_absolute(runs, 'regular', spec)}"
            label = f"rollout/{arm}_over_regular" + ("" if name == "k32" else f"_{name}")
            headline = arm == "dflash2" and name == "k32"
            value = median(ratios)
            found.append(at_least(label, value, 2.0, "x", detail) if headline else report(label, value, "x", detail))
    spec = CAPTURES["k32"][0]
    for arm in ("dflash2", "dflash"):
        lengths = [run.accept_length for run in runs if run.arm == arm and run.spec == spec]
        label = "rollout/accept_length" + ("" if arm == "dflash2" else f"_{arm}")
        found.append(at_least(label, median(lengths), 4.0, "tokens a step", f"{arm}, {_range(lengths)}"))
    return found


def _capture(repeats: int) -> list[Row]:
    found, twins = [], (load_engines(), load_engines())
    for arm in ARMS:
        for name, (on, off) in CAPTURES.items():
            pair = twins[0][arm], twins[1][arm]
            losses = [capture_loss(pair[:: 1 if i % 2 else -1], on, off, i) for i in range(repeats)]
            detail = f"{name}, steps with and without capture taking turns; {_range(losses)}"
            label = f"rollout/capture_loss_{arm}" + ("" if name == "k32" else f"_{name}")
            found.append(at_most(label, median(losses), 0.05, "fraction", detail))
    return found


def _generate(speeds: dict[str, list[float]]) -> Row:
    best = max(("static", "dynamic"), key=lambda cache: median(speeds[cache]))
    ratios = [ours / theirs for ours, theirs in zip(speeds["engine"], speeds[best], strict=True)]
    absolute = ", ".join(f"{name} {median(found):.0f}" for name, found in speeds.items())
    detail = f"over the {best} cache, {_range(ratios)}; tokens/s {absolute}"
    return at_least("rollout/regular_over_generate", median(ratios), 1.5, "x", detail)


def _paired(runs: list[Run], over: tuple[str, SamplingSpec], under: tuple[str, SamplingSpec]) -> list[float]:
    """Ratios of tokens/s inside each repeat, so that slow drifts of the machine cancel."""
    speed = {(run.arm, run.spec, run.repeat): run.tokens_per_s for run in runs}
    repeats = sorted({run.repeat for run in runs})
    return [speed[(*over, repeat)] / speed[(*under, repeat)] for repeat in repeats]


def _absolute(runs: list[Run], arm: str, spec: SamplingSpec) -> str:
    return f"{median(run.tokens_per_s for run in runs if run.arm == arm and run.spec == spec):.0f}"


def _range(values: Sequence[float]) -> str:
    return f"{len(values)} repeats, {min(values):.3f} to {max(values):.3f}"


def _timed(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    on_gpu = device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    if on_gpu:
        torch.cuda.synchronize()
    start = clock()
    result = work()
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - start, result
