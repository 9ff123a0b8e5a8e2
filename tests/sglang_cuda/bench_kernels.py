"""Law, draw and packed rows on a GPU, without sglang: whether they are right, what they launch, and how long they take.

    python -m tests.sglang_cuda.bench_kernels OUT.json

A step of eight requests is timed as the sampler (8 rows) and a verifier (64 rows) run it, capture off and on, beside
what stock sglang runs in the sampler. `us a step` is the wall time of a step among 100 that nobody waits for: the
larger of what the host needs to launch it and what the device needs to run it. `device us` is the kernels' own time.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.evidence import Row, all_of, at_most, document, print_rows, report
from miles_ext.law import law
from miles_ext.law_kernels import draw_rows
from miles_ext.sglang_plugin.batch_law import batch_law
from miles_ext.sglang_plugin.pack import pack
from miles_ext.sglang_plugin.plan import plan_of
from tests.sglang_cpu.stand_ins import request

REQUESTS, BLOCK, STEPS, REPEATS = 8, 8, 100, 5
VOCABULARIES = (49_152, 151_936)
FILTERS: dict[str, dict[str, Any]] = {
    "unfiltered": {}, "k50 p0.95": {"top_k": 50, "top_p": 0.95}, "k1024": {"top_k": 1024}, "p0.95": {"top_p": 0.95},
}  # fmt: skip
CAPTURES = {
    "unfiltered": {"K32": ("head", 32), "K128": ("head", 128)},
    "k50 p0.95": {"captured": ("complete", 4096)},
    "k1024": {"captured": ("complete", 4096)},
    "p0.95": {"captured": ("complete", 4096)},
}
# Launches that the law and the draw may take, and what capture may add: one kernel and one copy.
SAMPLER_LAUNCHES, VERIFIER_LAUNCHES, CAPTURE_LAUNCHES = 3, 1, 2
# 5 % of a step of 2 ms (the sampler, a 135M model) and of 4.3 ms (a verify step of the same).
SAMPLER_US, VERIFIER_US = 100, 215


class Step:
    """One step of the sampler (positions 1) or of a verifier. capture: kind and size, or none."""

    def __init__(self, vocabulary: int, positions: int, filters: dict[str, Any], capture: tuple[str, int]) -> None:
        self.positions = positions
        self.plan = plan_of([request(*capture, **filters) for _ in range(REQUESTS)])
        self.logits = logits_like_a_model(REQUESTS * positions, vocabulary)
        self.uniforms_of = len(self.logits)
        self.tokens = torch.zeros(len(self.logits), dtype=torch.int64, device="cuda")
        self.committed = torch.full((REQUESTS,), 3, dtype=torch.int32, device="cuda")

    def __call__(self) -> None:
        probs = batch_law(self.logits, self.plan)
        tokens = self.tokens
        if self.positions == 1:
            tokens = torch.empty(len(probs), dtype=torch.int32, device="cuda")
            draw_rows(probs, torch.rand(len(probs), dtype=torch.float64, device="cuda"), tokens)
        if self.plan.captures:
            flat = pack(probs, tokens, None if self.positions == 1 else self.committed, self.plan).flat
            torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True).copy_(flat, non_blocking=True)


def logits_like_a_model(rows: int, vocabulary: int) -> Tensor:
    """Float32 values of a bfloat16 head: a few likely tokens over a wide tail, with ties."""
    generator = torch.Generator("cuda").manual_seed(0)
    tail = torch.randn(rows, vocabulary, generator=generator, device="cuda") * 2
    tail[:, :64] += 6 * torch.rand(rows, 64, generator=generator, device="cuda")
    return tail.bfloat16().float()


def stock_sampler(logits: Tensor, filters: dict[str, Any]) -> Callable[[], Tensor]:
    """What sglang 0.5.23's sampler does with a batch of equal requests at temperature 1."""
    heat = torch.ones(len(logits), 1, device="cuda")
    k = torch.full((len(logits),), filters.get("top_k", 1 << 30), dtype=torch.int32, device="cuda")
    p = torch.full((len(logits),), filters.get("top_p", 1.0), device="cuda")

    def step() -> Tensor:
        given = logits.clone()
        given.div_(heat)
        given[:] = torch.softmax(given, dim=-1)
        if not filters:
            return (given / torch.empty_like(given).exponential_()).argmax(-1)
        if find_spec("flashinfer"):
            from flashinfer.sampling import top_k_top_p_sampling_from_probs

            return top_k_top_p_sampling_from_probs(given, k, p, filter_apply_order="joint")
        ranked, ids = given.sort(dim=-1, descending=True)
        mass = ranked.cumsum(-1)
        ranked[(mass - ranked > p[:, None]) | (torch.arange(ranked.shape[1], device="cuda") >= k[:, None])] = 0.0
        drawn = torch.multinomial(ranked, 1)
        return ids.gather(1, drawn)[:, 0]

    return step


def measure(step: Callable[[], Any]) -> tuple[int, float, float]:
    """Launches (copies included), device microseconds and wall microseconds of one step."""
    for _ in range(10):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(10):
            step()
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() or () if event.device_type.name == "CUDA"]
    walls = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        first = time.perf_counter()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        walls.append((time.perf_counter() - first) / STEPS * 1e6)
    device = sum(event.time_range.elapsed_us() for event in kernels) / 10
    return round(len(kernels) / 10), device, statistics.median(walls)


def times() -> list[Row]:
    found = []
    for vocabulary in VOCABULARIES:
        for positions, arm, base in ((1, "sampler", SAMPLER_LAUNCHES), (BLOCK, "verifier", VERIFIER_LAUNCHES)):
            for name, filters in FILTERS.items():
                title = f"{arm} V{vocabulary} {name}"
                off = measure(Step(vocabulary, positions, filters, ("none", 0)))
                found += said(title, off, base)
                if positions == 1:
                    stock = measure(stock_sampler(logits_like_a_model(REQUESTS, vocabulary), filters))
                    what = "flashinfer" if find_spec("flashinfer") else "sorting with torch"
                    found.append(report(f"kernels/{title}, stock", stock[2], "us a step",
                                        f"{stock[0]} launches, {stock[1]:.0f} device us; filters: {what}"))  # fmt: skip
                for capture, asked in CAPTURES[name].items():
                    on = measure(Step(vocabulary, positions, filters, asked))
                    found += said(f"{title} {capture}", on, base + CAPTURE_LAUNCHES)
                    limit = SAMPLER_US if positions == 1 else VERIFIER_US
                    found.append(at_most(f"kernels/{title} {capture}, added", on[2] - off[2], limit, "us a step"))
    return found


def said(title: str, measured: tuple[int, float, float], launches: int) -> list[Row]:
    return [
        at_most(f"kernels/{title}, launches", measured[0], launches, "launches"),
        report(f"kernels/{title}", measured[2], "us a step", f"{measured[1]:.0f} device us"),
    ]


def right() -> list[Row]:
    """The kernels against torch (as in the interpreter), and whole vocabularies against the law in float64."""
    command = [sys.executable, "-m", "tests.sglang_cpu.interpret_kernels"]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # both compile kernels
    found = []
    for vocabulary in VOCABULARIES:
        for name, filters in FILTERS.items():
            for order in ("top_k_first", "joint"):
                logits = logits_like_a_model(16, vocabulary)
                asked = (0.7, filters.get("top_k", 0), filters.get("top_p", 1.0), order)
                mine, wanted = law(logits, *asked).cpu().double(), law(logits.cpu().double(), *asked)
                same = int(((mine > 0) == (wanted > 0)).all(-1).sum())
                apart = float((mine - wanted).abs().sum(-1).max())
                title = f"kernels/law V{vocabulary} {name} {order}"
                found.append(at_most(title, apart, 2e-6, "L1", f"{same} of 16 rows with the support of float64"))
    said_by_other, errors = other.communicate()
    detail = " ".join(said_by_other.split()) + errors[-600:]
    return [all_of("kernels/compared with torch", len(said_by_other.splitlines()), 6, detail), *found]


def main(out: Path) -> int:
    found = right()
    print(f"compared after {time.monotonic() - START:.0f} s", flush=True)
    found += times()
    written = document("python -m tests.sglang_cuda.bench_kernels OUT.json", found)
    out.write_text(json.dumps(written, indent=1, allow_nan=False) + "\n")
    print_rows(found)
    print(f"{time.monotonic() - START:.0f} s", flush=True)
    return int(not all(row.passed for row in found))


if __name__ == "__main__":
    START = time.monotonic()
    sys.exit(main(Path(sys.argv[1])))
