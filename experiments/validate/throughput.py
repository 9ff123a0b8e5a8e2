"""Row `throughput`: what speculation gains with capture on, and what capture costs; reported with every outlier.

The workload and the timing are those of `bench rollout`: eight concurrent responses, three repeats, arms in turns.
"""

from __future__ import annotations

from statistics import median

import torch

from experiments.bench import rollout
from experiments.bench.rollout import Run
from experiments.evidence import Row, report
from experiments.validate.settings import Context

REPEATS = 3


def rows(context: Context) -> list[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        specs = dict.fromkeys(spec for pair in rollout.CAPTURES.values() for spec in pair)
        runs = rollout.measure(rollout.load_engines(), list(specs), REPEATS, context.pick(48, rollout.LENGTH))
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


def ratio(name: str, over: list[Run], under: list[Run]) -> Row:
    """Median of tokens/s over tokens/s, paired by repeat; all repeats are in the detail."""
    ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(over, under, strict=True)]
    every = ", ".join(f"{a.tokens_per_s:.0f}/{b.tokens_per_s:.0f}" for a, b in zip(over, under, strict=True))
    return report(name, median(ratios), "x", f"{min(ratios):.3g} to {max(ratios):.3g}; tokens/s {every}")
