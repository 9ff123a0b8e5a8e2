"""Row `throughput`: what speculation gains with capture on, and what capture costs; reported with every outlier."""

from __future__ import annotations

from dataclasses import replace

import torch

from experiments.bench import rollout
from experiments.evidence import Row
from experiments.validate.settings import Context


def rows(context: Context) -> list[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        engines = rollout.load_engines()
        specs = [spec for pair in rollout.CAPTURES.values() for spec in pair]
        runs = rollout.measure(engines, list(dict.fromkeys(specs)), 3, context.pick(48, rollout.LENGTH))
    finally:
        torch.set_num_threads(threads)
    judged = [*rollout._speed(runs), *rollout._capture(runs)]
    return [replace(row, name=row.name.replace("rollout/", "throughput/"), gate=None, passed=True) for row in judged]
