"""The rows of `bench estimator` on a GPU, timed with device events: centering, the fused pass and its bandwidth.

Inputs are larger than the L2 cache, and every arm of a ratio runs in turn within one process.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_ext.score_centering import EstimatorConfig, SupportTensors, coefficients, score_centered_loss

TOKENS, REPEATS = 2048, 21
CONFIG = EstimatorConfig(mode="tis", centering="on")


class Problem:
    def __init__(self, vocab: int, head: int) -> None:
        torch.manual_seed(17)
        self.logits = (torch.randn(TOKENS, vocab, device="cuda", dtype=torch.bfloat16) * 3).requires_grad_()
        self.advantages = torch.randn(TOKENS, device="cuda")
        ids, logprobs, sampled, sampled_lp = [], [], [], []
        for rows in self.logits.detach().split(64):
            q = (rows.float() + 0.3 * torch.randn(rows.shape, device="cuda")).log_softmax(-1)
            values, top = q.topk(head)
            drawn = torch.multinomial(q.exp(), 1)
            for kept, new in zip(
                (ids, logprobs, sampled, sampled_lp), (top, values, drawn[:, 0], q.gather(1, drawn)[:, 0]), strict=True
            ):
                kept.append(new.reshape(-1).cpu())
        chosen = torch.cat(sampled).numpy(), torch.cat(sampled_lp).numpy()
        offsets = np.arange(TOKENS + 1)
        self.head = SupportTensors.from_arrays(
            torch.cat(ids).numpy(), torch.cat(logprobs).numpy(), offsets * head, *chosen, "head", "cuda"
        )
        self.bare = SupportTensors.from_arrays(
            np.zeros(0, np.int64), np.zeros(0, np.float32), offsets * 0, *chosen, "head", "cuda"
        )

    def centered(self) -> None:
        self._step(self.head, CONFIG)

    def plain(self) -> None:
        self._step(self.bare, EstimatorConfig(mode="tis", centering="off"))

    def _step(self, support: SupportTensors, cfg: EstimatorConfig) -> None:
        self.logits.grad = None
        score_centered_loss(self.logits, support, self.advantages, cfg)[0].sum().backward()

    def naive(self) -> None:
        """log_softmax of a float32 copy and two gathers under autograd."""
        self.logits.grad = None
        rows = self.head.rows
        everything = self.logits.float().log_softmax(-1)
        lp_sampled = everything.gather(1, self.head.sampled[:, None])[:, 0]
        lp = everything.gather(1, rows.fold(self.head.token_ids))
        log_ratio, q = lp_sampled.detach() - self.head.sampled_logprobs, rows.fold(self.head.logprobs).exp()
        parts = coefficients(log_ratio, lp.detach().exp(), q, rows, "head", CONFIG)
        (-self.advantages * (parts.weight * lp_sampled - rows.sum(parts.entries * lp))).sum().backward()

    def peak_bytes(self, step: Callable[[], None]) -> int:
        self.logits.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before


def rows() -> list[dict[str, Any]]:
    found = []
    copy = _copy_bandwidth()
    for vocab, head in ((151_936, 32), (151_936, 128), (248_320, 128)):
        problem = Problem(vocab, head)
        times = _interleaved({"centered": problem.centered, "plain": problem.plain, "naive": problem.naive})
        peak = {name: problem.peak_bytes(getattr(problem, name)) for name in ("centered", "naive")}
        size = f"V={vocab}, K={head}, {TOKENS} tokens, bfloat16, {torch.cuda.get_device_name()}"
        floor = 3 * problem.logits.numel() * 2  # two reads and a write of bfloat16
        median, fastest, slowest = (f(times["centered"]) for f in (statistics.median, min, max))

        def ratio(top: str, bottom: str, times: dict[str, list[float]] = times) -> tuple[float, str]:
            pairs = [a / b for a, b in zip(times[top], times[bottom], strict=True)]
            return statistics.median(pairs), f"median of {len(pairs)}, range {min(pairs):.3f} to {max(pairs):.3f}"

        over_plain, spread_plain = ratio("centered", "plain")
        over_fused, spread_fused = ratio("naive", "centered")
        tag = f"v{vocab}_k{head}"
        found += [
            _row(f"cuda_centered_over_plain_{tag}", over_plain, "ratio", 1.05, True, f"{spread_plain}; {size}"),
            _row(f"cuda_naive_over_fused_time_{tag}", over_fused, "ratio", None, False, f"{spread_fused}; {size}"),
            _row(
                f"cuda_naive_over_fused_memory_{tag}", peak["naive"] / peak["centered"], "ratio", None, False,
                f"peak beyond the logits: naive {peak['naive']} bytes, fused {peak['centered']}; {size}",
            ),
            _row(
                f"cuda_bandwidth_{tag}", floor / median / copy, "of a copy's bandwidth", None, False,
                f"step {median * 1e3:.3f} ms ({fastest * 1e3:.3f} to {slowest * 1e3:.3f}) "
                f"for {floor} bytes; a device copy moves {copy / 1e12:.2f} TB/s; {size}",
            ),
        ]  # fmt: skip
        del problem
        torch.cuda.empty_cache()
    return found


def _row(name: str, value: float, unit: str, gate: float | None, at_most: bool, detail: str) -> dict[str, Any]:
    passed = gate is None or (value <= gate if at_most else value >= gate)
    text = None if gate is None else f"{'<=' if at_most else '>='} {gate}"
    return {"name": f"estimator/{name}", "value": value, "unit": unit, "gate": text, "pass": passed, "detail": detail}


def _seconds(step: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _interleaved(steps: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    for step in steps.values():
        step()
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(REPEATS):
        for name, step in steps.items():
            times[name].append(_seconds(step))
    return times


def _copy_bandwidth() -> float:
    """Bytes read and written a second by a large device-to-device copy."""
    source: Tensor = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    seconds = _interleaved({"copy": copy})["copy"]
    return 2 * source.numel() * source.element_size() / statistics.median(seconds)
