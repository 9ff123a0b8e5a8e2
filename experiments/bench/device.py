"""Timing and peak memory of steps on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


def nothing() -> None:
    pass


@dataclass(frozen=True)
class Step:
    """What is timed, and what it needs before each timing."""

    run: Callable[[], Any]
    prepare: Callable[[], Any] = nothing


def spread(values: list[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}"


def seconds(step: Step) -> float:
    step.prepare()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    step.run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def interleaved(steps: dict[str, Step], repeats: int) -> dict[str, list[float]]:
    for step in steps.values():
        seconds(step)
        seconds(step)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats):
        for name, step in list(steps.items())[:: 1 if turn % 2 else -1]:
            times[name].append(seconds(step))
    return times


def peak_bytes(step: Step) -> int:
    step.prepare()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step.run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
