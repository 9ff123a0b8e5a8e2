"""The rows of `bench estimator` on a GPU, timed with device events: centering, the fused pass, and its distance from
the floor of reading each bfloat16 logit twice and writing its gradient once, at the bandwidth of a copy in this run.

Every arm of a ratio runs in turn within one process, eagerly: time between two events holds the launches too. Peak
memory is the allocator's, beyond the logits. Every step gets its logits anew before each timing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from experiments.bench import estimator_peers, estimator_tune
from experiments.bench.device import Step, interleaved, peak_bytes, seconds, spread
from experiments.evidence import Row, at_least, at_most, guarded, report
from miles_ext.score_centering import EstimatorConfig, SupportTensors, coefficients, score_centered_loss

if TYPE_CHECKING:
    from miles_ext.cuda_kernels import Launch

TOKENS, REPEATS = 4096, 31
SHAPES = ((151_936, 128), (151_936, 32), (248_320, 128))
CONFIG = EstimatorConfig(mode="tis", centering="on")
PLAIN = EstimatorConfig(mode="tis", centering="off")


class Problem:
    """bfloat16 logits of the trainer, and heads of a sampler that is the trainer plus logit noise."""

    def __init__(self, vocab: int, head: int, tokens: int = TOKENS) -> None:
        torch.manual_seed(17)
        self.original = torch.randn(tokens, vocab, device="cuda", dtype=torch.bfloat16) * 3
        self.logits = self.original.clone().requires_grad_()
        self.advantages = torch.randn(tokens, device="cuda")
        ids, logprobs, sampled, sampled_lp = [], [], [], []
        for rows in self.original.split(64):
            q = (rows.float() + 0.3 * torch.randn(rows.shape, device="cuda")).log_softmax(-1)
            values, top = q.topk(head)
            drawn = torch.multinomial(q.exp(), 1)
            for kept, new in zip(
                (ids, logprobs, sampled, sampled_lp), (top, values, drawn[:, 0], q.gather(1, drawn)[:, 0]), strict=True
            ):
                kept.append(new.reshape(-1).cpu())
        chosen = torch.cat(sampled).numpy(), torch.cat(sampled_lp).numpy()
        offsets = np.arange(tokens + 1)
        self.head = SupportTensors.from_arrays(
            torch.cat(ids).numpy(), torch.cat(logprobs).numpy(), offsets * head, *chosen, "head", "cuda"
        )
        self.bare = SupportTensors.from_arrays(
            np.zeros(0, np.int64), np.zeros(0, np.float32), offsets * 0, *chosen, "head", "cuda"
        )

    def restore(self) -> None:
        self.logits.data.copy_(self.original)

    def step(self, support: SupportTensors, cfg: EstimatorConfig, *, consume: bool = False) -> Step:
        def run() -> None:
            loss, _ = score_centered_loss(self.logits, support, self.advantages, cfg, consume=consume)
            torch.autograd.grad(loss.sum(), self.logits)

        return Step(run, self.restore)  # also where nothing is consumed: the step before may have been one that did

    def steps(self) -> dict[str, Step]:
        """plain: the same kernels at K = 0, a step on the selected log-probability alone."""
        return {
            "centered": self.step(self.head, CONFIG),
            "plain": self.step(self.bare, PLAIN),
            "consuming": self.step(self.head, CONFIG, consume=True),
            "naive": Step(self.naive, self.restore),
        }

    def naive(self) -> None:
        """log_softmax of a float32 copy and two gathers under autograd."""
        rows = self.head.rows
        everything = self.logits.float().log_softmax(-1)
        lp_sampled = everything.gather(1, self.head.sampled[:, None])[:, 0]
        lp = everything.gather(1, rows.fold(self.head.token_ids))
        log_ratio, q = lp_sampled.detach() - self.head.sampled_logprobs, rows.fold(self.head.logprobs).exp()
        parts = coefficients(log_ratio, lp.detach().exp(), q, rows, "head", CONFIG)
        loss = -self.advantages * (parts.weight * lp_sampled - rows.sum(parts.entries * lp))
        torch.autograd.grad(loss.sum(), self.logits)


def rows(repeats: int = REPEATS) -> Iterator[Row]:
    """Under the launches that ship, then under the fastest of the table of launches; peers, CUDA graphs."""
    copy = copy_bandwidth()
    yield report("estimator/cuda_copy", copy / 1e12, "TB/s", "bytes read and written by a large device copy")
    yield from judged("", copy, repeats)
    launches: dict[str, Launch] = {}
    yield from guarded("estimator/cuda_tune", lambda: estimator_tune.rows(Problem(*SHAPES[0]), launches))
    if launches:
        with estimator_tune.in_force(launches):
            yield from judged("fastest_", copy, repeats)
    yield from guarded("estimator/cuda_peers", lambda: estimator_peers.rows(repeats))
    torch.cuda.empty_cache()
    yield from guarded("estimator/cuda_launches", lambda: launched(Problem(*SHAPES[0]), copy))


def judged(arm: str, copy: float, repeats: int) -> Iterator[Row]:
    for vocab, head in SHAPES:
        tag = f"{arm}v{vocab}_k{head}"
        yield from guarded(f"estimator/cuda_{tag}", partial(shape, vocab, head, copy, tag, repeats))
        torch.cuda.empty_cache()


def shape(vocab: int, head: int, copy: float, tag: str, repeats: int) -> list[Row]:
    return judge(Problem(vocab, head), copy, tag, repeats)


def launched(problem: Problem, copy: float) -> Iterator[Row]:
    """What the launches cost: the host's time, and the step without them."""
    step, floor = problem.steps()["centered"], 6 * problem.logits.numel() / copy
    host = host_seconds(step)
    yield report("estimator/cuda_host", host * 1e6, "us", "until the eager step's launches are all queued")
    captured = graph_seconds(step)
    yield report(
        "estimator/cuda_floor_over_graph", floor / captured, "of the floor",
        f"the step replayed from a CUDA graph: {captured * 1e3:.3f} ms; V={problem.logits.shape[1]}",
    )  # fmt: skip


def judge(problem: Problem, copy: float, tag: str, repeats: int) -> list[Row]:
    steps = problem.steps()
    times = interleaved(steps, repeats)
    peak = {name: peak_bytes(step) for name, step in steps.items()}
    tokens, vocab = problem.logits.shape
    size = f"{tokens} tokens, bfloat16, {torch.cuda.get_device_name()}; {estimator_tune.launches_in_force()}"
    floor = 6 * problem.logits.numel() / copy

    def ratio(top: str, bottom: str) -> tuple[float, str]:
        pairs = [a / b for a, b in zip(times[top], times[bottom], strict=True)]
        middle = f"{statistics.median(times[top]) * 1e3:.3f} over {statistics.median(times[bottom]) * 1e3:.3f} ms"
        return statistics.median(pairs), f"median of {len(pairs)}, range {spread(pairs)}; {middle}; {size}"

    over_plain, overhead = ratio("centered", "plain")
    speedup, faster = ratio("naive", "centered")
    median = {name: statistics.median(found) for name, found in times.items()}
    memory = "peak beyond the logits"
    return [
        at_most(f"estimator/cuda_centered_over_plain_{tag}", over_plain, 1.02, "ratio", overhead),
        at_least(f"estimator/cuda_naive_over_fused_time_{tag}", speedup, 8, "ratio", faster),
        at_least(
            f"estimator/cuda_naive_over_fused_memory_{tag}", peak["naive"] / peak["consuming"], 10, "ratio",
            f"{memory}, whose place the gradient takes: naive {peak['naive']:,} bytes, "
            f"fused {peak['consuming']:,}; {size}",
        ),
        report(
            f"estimator/cuda_naive_over_kept_memory_{tag}", peak["naive"] / peak["centered"], "ratio",
            f"{memory}, which are kept beside their gradient: naive {peak['naive']:,} bytes, fused "
            f"{peak['centered']:,}, of which the gradient is {problem.logits.nbytes:,}; {size}",
        ),
        *(
            at_least(
                f"estimator/cuda_floor_over_{name}_{tag}", floor / median[name], 0.8, "of the floor",
                f"predicted {6 * problem.logits.numel():,} bytes and {2 * problem.logits.numel():,} exponentials, "
                f"{floor * 1e3:.3f} ms at {copy / 1e12:.2f} TB/s; "
                f"measured {median[name] * 1e3:.3f} ms, range {spread([t * 1e3 for t in times[name]])}; {size}",
            )
            for name in ("centered", "consuming")
        ),
    ]  # fmt: skip


def host_seconds(step: Step) -> float:
    found = []
    for _ in range(11):
        step.prepare()
        torch.cuda.synchronize()
        start = time.perf_counter()
        step.run()
        found.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(found)


def graph_seconds(step: Step) -> float:
    """Median over replays of the step captured as one CUDA graph: what is left without the launches."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    return statistics.median(seconds(Step(graph.replay)) for _ in range(11))


def copy_bandwidth() -> float:
    """Bytes read and written a second by a large device-to-device copy."""
    source: Tensor = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    times = interleaved({"copy": Step(lambda: target.copy_(source))}, 11)["copy"]
    return 2 * source.nbytes / statistics.median(times)
