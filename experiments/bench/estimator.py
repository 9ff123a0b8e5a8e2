"""`bench estimator`: what centering costs over a plain step, and what the fused pass saves over the naive one.

All time ratios are taken side by side in one process, one torch thread, on processor seconds, which other load on the
machine does not stretch. That process keeps freed memory, as a device allocator does: otherwise the page faults of the
fresh gradient, the same in every arm, would be half of each step. Peak memory is the highest sum of what torch's
allocator reports allocated and not yet freed during a step.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from experiments.bench import estimator_cuda
from experiments.evidence import Row, at_least, at_most, guarded, report
from miles_ext.score_centering import EstimatorConfig, SupportTensors, coefficients, score_centered_loss

VOCAB = 151_936
HEAD = 128
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's mallopt
CENTERED = EstimatorConfig(mode="tis", centering="on")
PLAIN = EstimatorConfig(mode="tis", centering="off")


class Problem:
    """Trainer logits and the sampler's head for `tokens` tokens; the sampler is the trainer plus logit noise."""

    def __init__(self, tokens: int, vocab: int = VOCAB, head: int = HEAD) -> None:
        generator = torch.Generator().manual_seed(17)
        self.logits = torch.randn(tokens, vocab, generator=generator).mul_(3).requires_grad_()
        self.advantages = torch.randn(tokens, generator=generator)
        columns = ids, logprobs, sampled, sampled_logprobs = [], [], [], []
        for row in self.logits.detach():  # one row at a time: setting up must not dominate peak memory
            q = (row + 0.3 * torch.randn(vocab, generator=generator)).log_softmax(-1)
            values, top = q.topk(head)
            drawn = torch.multinomial(q.exp(), 1, generator=generator)
            for column, value in zip(columns, (top, values, drawn, q[drawn]), strict=True):
                column.append(value)
        self.captured = self._support(torch.cat(ids), torch.cat(logprobs), head, sampled, sampled_logprobs)
        self.bare = self._support(torch.zeros(0), torch.zeros(0), 0, sampled, sampled_logprobs)

    @staticmethod
    def _support(ids: Tensor, logprobs: Tensor, width: int, sampled: list, sampled_logprobs: list) -> SupportTensors:
        return SupportTensors.from_arrays(
            ids.numpy(), logprobs.numpy(), np.arange(len(sampled) + 1) * width,
            torch.cat(sampled).numpy(), torch.cat(sampled_logprobs).numpy(), "head",
        )  # fmt: skip

    def centered(self) -> None:
        self._step(self.captured, CENTERED)

    def plain(self) -> None:
        """The same kernel at K = 0: a step on the selected log-probability alone."""
        self._step(self.bare, PLAIN)

    def _step(self, support: SupportTensors, cfg: EstimatorConfig) -> None:
        self.logits.grad = None
        score_centered_loss(self.logits, support, self.advantages, cfg)[0].sum().backward()

    def naive(self) -> None:
        """The same estimator through log_softmax and two gathers under autograd."""
        self.logits.grad = None
        support, rows = self.captured, self.captured.rows
        everything = self.logits.log_softmax(-1)
        lp_sampled = everything.gather(1, support.sampled[:, None])[:, 0]
        lp = everything.gather(1, rows.fold(support.token_ids))
        log_ratio, q = lp_sampled.detach() - support.sampled_logprobs, rows.fold(support.logprobs).exp()
        parts = coefficients(log_ratio, lp.detach().exp(), q, rows, "head", CENTERED)
        (-self.advantages * (parts.weight * lp_sampled - rows.sum(parts.entries * lp))).sum().backward()

    def saved_buffers(self, step: Callable[[], None]) -> float:
        """What autograd keeps for backward beyond the logits themselves, in units of the logits."""
        kept: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            step()
        logits = self.logits.untyped_storage()
        kept.pop(logits.data_ptr(), None)
        return sum(kept.values()) / logits.nbytes()

    def peak_buffers(self, step: Callable[[], None]) -> float:
        """Highest memory in use during the step beyond the logits, in units of the logits."""
        self.logits.grad = None
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(trace))
            events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
        changes = [event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])]
        return max(itertools.accumulate(changes)) / self.logits.untyped_storage().nbytes()


def rows(quick: bool = False) -> Iterator[dict[str, Any]]:
    """Measure and judge, on a GPU first where there is one; `quick` takes fewer tokens and repeats."""
    tokens, repeats = (32, 9) if quick else (128, 31)
    if torch.cuda.is_available():
        for row in guarded("estimator/cuda", estimator_cuda.rows):
            yield row.as_json()
    for row in guarded("estimator/cpu", lambda: on_host(tokens, repeats)):
        yield row.as_json()


def on_host(tokens: int, repeats: int) -> Iterator[Row]:
    overhead, speedup, copy, power = _in_fresh_process(_measure_times, tokens, repeats)
    size = f"V={VOCAB}, K={HEAD}, {tokens} tokens, float32, forward + backward, one thread"
    yield at_most(
        "estimator/centered_over_plain", overhead.ratio, 1.05, "ratio", overhead.detail("centered", "plain") + size
    )
    yield report("estimator/naive_over_fused_time", speedup.ratio, "ratio", speedup.detail("naive", "fused") + size)
    moved, powers, seconds = 12 * VOCAB / copy, 2 * VOCAB / power, statistics.median(overhead.first)
    yield report(
        "estimator/floor_over_centered", max(moved, powers) / seconds, "of the floor",
        f"predicted for a token: {12 * VOCAB:,} bytes (two reads, one write) in {moved * 1e6:.0f} us at "
        f"{copy / 1e9:.1f} GB/s, {2 * VOCAB:,} exponentials in {powers * 1e6:.0f} us at {power / 1e9:.2f} G/s in "
        f"cache; measured {seconds * 1e6:.0f} us, range {min(overhead.first) * 1e6:.0f} to "
        f"{max(overhead.first) * 1e6:.0f}; {size}",
    )  # fmt: skip
    problem = Problem(tokens)
    saved = {step: problem.saved_buffers(getattr(problem, step)) for step in ("centered", "naive")}
    peak = {step: problem.peak_buffers(getattr(problem, step)) for step in ("centered", "naive")}
    yield at_least(
        "estimator/naive_over_fused_memory", peak["naive"] / peak["centered"], 2, "ratio",
        f"peak beyond the logits, in units of [N, V] float32: naive {peak['naive']:.2f}, fused "
        f"{peak['centered']:.2f} (the returned gradient is 1); {tokens} tokens",
    )  # fmt: skip
    yield at_most(
        "estimator/saved_beyond_logits", saved["centered"], 0.02, "[N, V] buffers",
        f"kept by autograd for backward; naive keeps {saved['naive']:.2f}; {tokens} tokens",
    )  # fmt: skip


@dataclass
class Paired:
    """Processor seconds a token of two steps, run side by side."""

    first: list[float]
    second: list[float]

    @property
    def ratios(self) -> list[float]:
        return [a / b for a, b in zip(self.first, self.second, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    def detail(self, first: str, second: str) -> str:
        return (
            f"median of {len(self.ratios)} interleaved ratios, range {min(self.ratios):.3f} to {max(self.ratios):.3f}; "
            f"median us a token: {first} {statistics.median(self.first) * 1e6:.0f}, "
            f"{second} {statistics.median(self.second) * 1e6:.0f}; "
        )


def _paired(first: Callable[[], None], second: Callable[[], None], tokens: int, repeats: int) -> Paired:
    """Alternates which goes first, so that drift of the machine cancels in the median."""
    for step in (first, second):  # the first call of a kernel is not its price
        step()
    found = Paired([], [])
    for repeat in range(repeats):
        arms = [(first, found.first), (second, found.second)]
        for step, seconds in arms if repeat % 2 == 0 else reversed(arms):
            seconds.append(_seconds(step) / tokens)
    return found


def _seconds(step: Callable[[], Any]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def _in_fresh_process(measure: Callable[..., Any], *arguments: Any) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, arguments)


def _measure_times(tokens: int, repeats: int) -> tuple[Paired, Paired, float, float]:
    """centered beside plain, naive beside centered; bytes a second of a copy and exponentials a second in cache."""
    torch.set_num_threads(1)
    libc = ctypes.CDLL(None)
    for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1)):
        libc.mallopt(option, value)
    problem = Problem(tokens)
    large, small = torch.zeros(tokens, VOCAB), torch.zeros(1 << 16)
    out, again = torch.zeros_like(large), torch.zeros_like(small)
    copy = min(_seconds(lambda: out.copy_(large)) for _ in range(repeats))
    power = min(_seconds(lambda: [torch.exp2(small, out=again) for _ in range(200)]) for _ in range(repeats))
    return (
        _paired(problem.centered, problem.plain, tokens, repeats),
        _paired(problem.naive, problem.centered, tokens, max(repeats // 3, 3)),
        2 * large.nbytes / copy,
        200 * small.numel() / power,
    )
