"""Chain runs on disk in the form of any other run: metrics, start and manifest, so that they are compared alike."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import yaml

from experiments.artifacts import START_FILE, write_manifest
from experiments.mismatch.chain import STATES, VOCAB, ChainArm, train_chain
from experiments.tracking import METRICS_FILE, write_line
from miles_ext.tensors import digest

MISMATCHES = {
    "exact": {}, "noise0.5": {"noise": 0.5}, "noise1": {"noise": 1.0}, "int8": {"levels": "int8"},
    "int4": {"levels": "int4"}, "lag1": {"lag": 1}, "lag4": {"lag": 4}, "lag8": {"lag": 8}, "lag16": {"lag": 16},
}  # fmt: skip
QUICK = ("exact", "noise1", "lag8")


def chain_arms(quick: bool) -> dict[str, ChainArm]:
    """The whole factorial of mismatch, payoff, mode and centering, with a few arms beside it."""
    found = {}
    for (mismatch, settings), payoff, mode, centering in itertools.product(
        MISMATCHES.items(), ("raw", "group", "placebo"), ("none", "tis", "mis"), ("on", "diagnose")
    ):
        if payoff == "placebo" and mismatch not in ("exact", "noise0.5", "noise1"):
            continue
        if not quick or mismatch in QUICK:
            arm = ChainArm(mode=mode, centering=centering, payoff=payoff, **settings)
            found[f"{mismatch}-{payoff}-{mode}-{centering}"] = arm
    for mode, centering in itertools.product(("none", "tis"), ("on", "diagnose")):  # heads smaller than the support
        found[f"noise1-raw-{mode}-head4-{centering}"] = ChainArm(mode=mode, centering=centering, noise=1.0, head=4)
    return found | {"noise1-raw-none-off": ChainArm(centering="off", noise=1.0)}


def run_chain(
    run_dir: Path, seeds: Sequence[int], steps: int, say: Callable[[str], None], *, quick: bool = False,
    processes: int = 2,
) -> None:  # fmt: skip
    """Every arm with every seed, in `run_dir`/<arm>-s<seed>. One that raises is on disk with its reason."""
    arms = chain_arms(quick)
    run_dir.mkdir(parents=True)
    listed = [{"name": name, **dataclasses.asdict(arm)} for name, arm in arms.items()]
    config = {"task": "chain", "steps": steps, "seeds": list(seeds), "arms": listed}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    work = [(run_dir / f"{name}-s{seed}", arm, seed, steps) for seed in seeds for name, arm in arms.items()]
    with ProcessPoolExecutor(processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for number, name in enumerate(pool.map(run_one, work, chunksize=4), 1):
            if number % 50 == 0 or number == len(work):
                say(f"chain {number}/{len(work)} runs, last {name}")


def run_one(work: tuple[Path, ChainArm, int, int]) -> str:
    folder, arm, seed, steps = work
    folder.mkdir()
    start = {"trained_digest": digest({"table": torch.zeros(STATES, VOCAB, dtype=torch.float64)})}
    (folder / START_FILE).write_text(json.dumps(start) + "\n")
    failure = ""
    with (folder / METRICS_FILE).open("w") as file:
        try:
            train_chain(arm, seed, steps, lambda step, metrics: write_line(file, step, metrics))
        except ValueError as error:
            failure = f"{type(error).__name__}: {error}"
    write_manifest(folder, failure)
    return folder.name
