"""Row `throughput`: what speculation gains with capture on, and what capture costs; reported with every outlier.

The workload and the timing are those of `bench rollout`: eight concurrent responses, three repeats, arms in turns. A
server is timed by the clock on the wall, HTTP and decoding included.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch

from experiments.bench import rollout
from experiments.bench.rollout import LENGTH, Run
from experiments.evidence import Row, report
from experiments.validate.settings import Context
from miles_ext.sampling import SamplingSpec

REPEATS = 3


def rows(context: Context) -> list[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    specs, length = dict.fromkeys(s for pair in rollout.CAPTURES.values() for s in pair), context.pick(48, LENGTH)
    try:
        if context.engines.name == "sglang":
            runs = served(context, list(specs), length)
        else:
            runs = rollout.measure(rollout.load_engines(), list(specs), REPEATS, length)
    finally:
        torch.set_num_threads(threads)

    def of(arm: str, spec: object) -> list[Run]:
        return [run for run in runs if run.arm == arm and run.spec == spec]

    found = []
    for capture, (on, off) in rollout.CAPTURES.items():
        for arm in rollout.ARMS:
            if arm != "regular":
                found.append(ratio(f"throughput/{arm}_over_regular {capture}", of(arm, on), of("regular", on)))
                lengths = [run.accept_length for run in of(arm, on)]
                found.append(report(f"throughput/accept_length {arm} {capture}", median(lengths), "tokens a step"))
            found.append(ratio(f"throughput/capture_on_over_off {arm} {capture}", of(arm, on), of(arm, off)))
    return found


def served(context: Context, specs: Sequence[SamplingSpec], length: int) -> list[Run]:
    """As `bench.rollout.measure`, of servers."""
    engines, runs = {arm: context.engines.open(arm, "trained", max_concurrency=8) for arm in rollout.ARMS}, []
    for repeat in range(-1, REPEATS):
        for spec in specs if repeat % 2 else specs[::-1]:
            for arm, engine in engines.items():
                started = time.perf_counter()
                done = engine.generate(rollout.requests(spec, max(repeat, 0), length=length))
                seconds = time.perf_counter() - started
                tokens, steps = sum(map(len, done)), sum(one.spec.live_steps for one in done)
                runs.append(Run(arm, spec, repeat, tokens / seconds, (tokens - len(done)) / steps))
    return [run for run in runs if run.repeat >= 0]


def ratio(name: str, over: list[Run], under: list[Run]) -> Row:
    """Median of tokens/s over tokens/s, paired by repeat; all repeats are in the detail."""
    ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(over, under, strict=True)]
    every = ", ".join(f"{a.tokens_per_s:.0f}/{b.tokens_per_s:.0f}" for a, b in zip(over, under, strict=True))
    return report(name, median(ratios), "x", f"{min(ratios):.3g} to {max(ratios):.3g}; tokens/s {every}")
