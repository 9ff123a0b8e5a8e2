"""Launches of the two kernels that read the logits, timed side by side on a GPU; the fastest can be put into force.

What ships is what `cuda_kernels.SCAN` and `GRADIENT` say. They are constants, not chosen at run time: the launch of
`scan` orders its sums, so a choice by the clock would let two runs of one job, or two ranks, differ in the last bit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from experiments.evidence import Row, not_measured, report

if TYPE_CHECKING:
    from experiments.bench.estimator_cuda import Problem
    from miles_ext.cuda_kernels import Launch

    Kernel = Callable[[Problem, Launch], tuple[Callable[[], Any], int]]

BUDGET_S = 35.0  # a kernel; each launch is compiled anew
LAUNCHES = (  # block, warps, programs, evict, stages; the likeliest first
    (4096, 4, 2048, "evict_first", 1), (4096, 8, 2048, "evict_first", 1), (8192, 8, 2048, "evict_first", 1),
    (2048, 4, 2048, "evict_first", 1), (4096, 4, 8192, "evict_first", 1), (4096, 4, 2048, "", 1),
    (8192, 16, 2048, "evict_first", 1), (4096, 8, 8192, "evict_first", 1), (2048, 4, 2048, "evict_first", 3),
    (1024, 4, 2048, "evict_first", 1), (2048, 2, 2048, "evict_first", 1), (8192, 8, 8192, "evict_first", 1),
    (4096, 8, 2048, "", 1), (4096, 8, 2048, "evict_first", 3), (8192, 8, 2048, "", 1),
    (1024, 4, 2048, "evict_first", 3), (2048, 4, 8192, "evict_first", 1), (4096, 4, 32768, "evict_first", 1),
    (2048, 4, 32768, "evict_first", 1), (1024, 2, 2048, "evict_first", 3),
)  # fmt: skip


def rows(problem: Problem, fastest: dict[str, Launch]) -> Iterator[Row]:
    """A row a launch; its bandwidth counts what the kernel must move. Puts the fastest launches into `fastest`."""
    from miles_ext.cuda_kernels import Launch  # imports triton, which a machine without a GPU need not have

    for kernel in (scan, gradient):
        yield from measure(kernel, problem, [Launch(*values) for values in LAUNCHES], fastest)


def measure(kernel: Kernel, problem: Problem, launches: list[Launch], fastest: dict[str, Launch]) -> Iterator[Row]:
    base, times, started = f"estimator/cuda_{kernel.__name__}", {}, time.monotonic()
    for launch in launches:
        name = f"{base}/{label(launch)}"
        if time.monotonic() - started > BUDGET_S:
            yield not_measured(name, f"the {BUDGET_S:.0f} s of this kernel's launches were over")
            continue
        try:
            call, moved = kernel(problem, launch)
            found = kernel_seconds(call)
        except Exception as error:  # a launch that the device or the compiler cannot do
            yield not_measured(name, f"{type(error).__name__}: {str(error)[:300]}")
            continue
        times[launch] = statistics.median(found)
        yield report(
            name, times[launch] * 1e3, "ms",
            f"range {min(found) * 1e3:.3f} to {max(found) * 1e3:.3f}; {moved / times[launch] / 1e12:.2f} TB/s",
        )  # fmt: skip
    best = fastest[kernel.__name__] = min(times, key=times.__getitem__)
    yield report(f"{base}_fastest", times[best] * 1e3, "ms", f"of {len(times)} launches: {label(best)}")


@contextmanager
def in_force(launches: dict[str, Launch]) -> Iterator[None]:
    """Use `launches` (kernel: its launch) in place of what ships."""
    from miles_ext import cuda_kernels

    names = {kernel: kernel.upper() for kernel in launches}
    shipped = {name: getattr(cuda_kernels, name) for name in names.values()}
    try:
        for kernel, launch in launches.items():
            setattr(cuda_kernels, names[kernel], launch)
        yield
    finally:
        for name, launch in shipped.items():
            setattr(cuda_kernels, name, launch)


def launches_in_force() -> str:
    from miles_ext.cuda_kernels import GRADIENT, SCAN

    return f"scan {label(SCAN)}, gradient {label(GRADIENT)}"


def label(launch: Launch) -> str:
    evict = launch.evict or "plain"
    return f"b{launch.block}_w{launch.warps}_p{launch.programs}_{evict}_s{launch.stages}"


def scan(problem: Problem, launch: Launch) -> tuple[Callable[[], Any], int]:
    from miles_ext import cuda_kernels

    support = problem.head
    return lambda: cuda_kernels.scan(
        problem.original, support.sampled, support.token_ids, support.rows.offsets, 1.0, problem.original.shape[1],
        first_id=0, normalise=True, entropy=False, widest=support.rows.widest, launch=launch,
    ), 2 * problem.original.numel()  # fmt: skip


def gradient(problem: Problem, launch: Launch) -> tuple[Callable[[], Any], int]:
    from experiments.bench.estimator_cuda import CONFIG
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
