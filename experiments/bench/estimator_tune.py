"""`bench estimator_tune` (a GPU): each launch of the table for the two kernels that read the logits, with its time.

The fastest of each kind is then put into force, and `bench estimator`'s rows of the GPU follow under it; what ships is
what `cuda_kernels.SCAN` and `GRADIENT` say.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from experiments.bench import estimator_cuda
from experiments.bench.estimator_cuda import CONFIG, Problem
from experiments.evidence import Row, report

if TYPE_CHECKING:
    from miles_ext.cuda_kernels import Launch

BLOCKS = ((1024, 4), (2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16), (2048, 2))

def launches() -> list[Launch]:
    from miles_ext.cuda_kernels import Launch  # imports triton, which a machine without a GPU need not have

    return [
        *(Launch(*shape, programs) for shape, programs in itertools.product(BLOCKS, (2048, 8192, 32768))),
        *(Launch(block, warps, 2048, "") for block, warps in BLOCKS),
        *(Launch(block, warps, 2048, stages=3) for block, warps in BLOCKS[:5]),
    ]


def rows(quick: bool = False) -> list[dict[str, Any]]:
    """Rows of every launch; the bandwidth counts what the kernel must move. `quick` leaves the judged rows out."""
    if not torch.cuda.is_available():
        raise ValueError("bench estimator_tune measures kernels on a GPU; accepted: a host with CUDA")
    problem = Problem(*estimator_cuda.SHAPES[0])
    found = [row for kernel in (scan, gradient) for row in measure(kernel, problem)]
    del problem
    torch.cuda.empty_cache()
    return [row.as_json() for row in found] + ([] if quick else estimator_cuda.rows())


def scan(problem: Problem, launch: Launch) -> tuple[Callable[[], Any], int]:
    from miles_ext import cuda_kernels

    support = problem.head
    return lambda: cuda_kernels.scan(
        problem.original, support.sampled, support.token_ids, support.rows.offsets, 1.0, problem.original.shape[1],
        first_id=0, normalise=True, entropy=False, widest=support.rows.widest, launch=launch,
    ), 2 * problem.original.numel()  # fmt: skip


def gradient(problem: Problem, launch: Launch) -> tuple[Callable[[], Any], int]:
    from miles_ext import cuda_kernels

    support, rows = problem.head, problem.head.rows
    stats, gathered = scan(problem, cuda_kernels.SCAN)[0]()
    _, _, factors, entries = cuda_kernels.estimate(
        stats, gathered, support.token_ids, support.logprobs, rows.offsets, support.sampled, support.sampled_logprobs,
        problem.advantages, 1.0, mode="tis", complete=False, centering="on", entropy=False, widest=rows.widest,
        bounds=(2.0, 0.5, 5.0, 0.69, -0.69, 1.6, CONFIG.rho_max, CONFIG.tail_floor),
    )  # fmt: skip
    out, upstream = torch.empty_like(problem.original), torch.ones((), device="cuda").expand(len(support))
    return lambda: cuda_kernels.gradient(
        out, problem.original, 1.0, factors, entries, upstream, support.sampled, support.token_ids, rows.offsets,
        problem.original.shape[1], first_id=0, normalise=True, widest=rows.widest, launch=launch,
    ), 4 * problem.original.numel()  # fmt: skip


def measure(kernel: Callable[[Problem, Launch], tuple[Callable[[], Any], int]], problem: Problem) -> list[Row]:
    from miles_ext import cuda_kernels

    found, best = [], {}
    for launch in launches():
        call, moved = kernel(problem, launch)
        times = kernel_seconds(call)
        best[launch] = statistics.median(times)
        found.append(report(
            f"estimator/cuda_{kernel.__name__}/b{launch.block}_w{launch.warps}_p{launch.programs}"
            f"_{launch.evict or 'plain'}_s{launch.stages}",
            best[launch] * 1e3, "ms",
            f"range {min(times) * 1e3:.3f} to {max(times) * 1e3:.3f}; {moved / best[launch] / 1e12:.2f} TB/s",
        ))  # fmt: skip
    fastest = min(best, key=best.__getitem__)
    setattr(cuda_kernels, kernel.__name__.upper(), fastest)
    found.append(report(f"estimator/cuda_{kernel.__name__}_fastest", best[fastest] * 1e3, "ms", f"{fastest}"))
    return found


def kernel_seconds(call: Callable[[], Any], repeats: int = 15) -> list[float]:
    """One launch at a time, each between its own events, queued without a pause."""
    for _ in range(3):
        call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events]
