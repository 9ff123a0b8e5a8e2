"""Runs of one folder or several, of one day or several, joined: which arm differs from which, over paired seeds.

Arms whose names are alike up to a last word `on`, `off` or `diagnose` make a family: centering and its control. Every
run of every folder is accounted for; one that failed, or that cannot be shown to be paired, is named and left out.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.artifacts import MANIFEST_FILE, START_FILE, arm_and_seed, arm_dirs
from experiments.comparison import prompts_digests
from experiments.statistics import Estimate, estimate, paired
from experiments.tracking import METRICS_FILE, read_metrics

TREATED, CONTROLS = "on", ("diagnose", "off")
# Figure of a run: heading, metric, what is made of its steps.
FIGURES = {
    "reward": ("late reward", "rollout/raw_reward", "late"),
    "trained": ("reward of the trained weights", "eval/trained_reward", "last"),
    "entropy": ("entropy, nats", "train/entropy", "late"),
    "gap": ("logprob gap, nats", "train/train_rollout_logprob_abs_diff", "late"),
    "drift": ("drift, exact", "sc/drift_norm", "mean"),
    "signal": ("signal, exact", "sc/signal_norm", "mean"),
    "correction": ("correction norm", "sc/correction_norm", "mean"),
    "head_mass": ("head mass", "sc/head_mass", "mean"),
    "accept": ("accept length", "spec/accept_length", "late"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """One arm and seed. series: {metric: {step: value}}. prompts: a digest a step, none where a task has no prompts."""

    folder: Path
    arm: str
    seed: int
    state: str
    failure: str
    initial: str
    prompts: tuple[str, ...]
    series: dict[str, dict[int, float]]

    @property
    def steps(self) -> int:
        return max(self.series.get("rollout/raw_reward", {-1: 0.0})) + 1

    def figures(self) -> dict[str, float]:
        found = {}
        for name, (_, metric, reduce) in FIGURES.items():
            points = self.series.get(metric, {})
            values = [points[step] for step in sorted(points)]
            if values and np.isfinite(values).all():
                late = values[-max(1, len(values) // 4) :]
                found[name] = float(values[-1] if reduce == "last" else np.mean(late if reduce == "late" else values))
        return found


@dataclass(frozen=True, slots=True)
class Family:
    """Centering against its control. figures: {figure: (treated, control, difference)}, over `seeds`."""

    name: str
    treated: str
    control: str
    seeds: tuple[int, ...]
    figures: dict[str, tuple[Estimate, Estimate, Estimate]]


@dataclass(frozen=True, slots=True)
class Joined:
    runs: list[Run]
    families: list[Family]
    left_out: list[str]

    def document(self) -> dict[str, Any]:
        runs = [
            {"name": f"{run.arm}-s{run.seed}", "folder": run.folder.parent.name, "state": run.state,
             "failure": run.failure, "steps": run.steps, **run.figures()}
            for run in self.runs
        ]  # fmt: skip
        return {
            "runs": runs, "left_out": self.left_out, "families": [dataclasses.asdict(one) for one in self.families],
        }  # fmt: skip


def join(run_dirs: Sequence[Path]) -> Joined:
    """Read every run of the folders and pair what can be paired. ValueError for a folder that holds no run."""
    runs = [read_run(folder) for run_dir in run_dirs for folder in arm_dirs(run_dir)]
    often = Counter((run.arm, run.seed) for run in runs)
    twice = {arm for (arm, _), count in often.items() if count > 1}  # the same of another day is another arm
    runs = [
        dataclasses.replace(run, arm=f"{run.folder.parent.name}:{run.arm}") if run.arm in twice else run
        for run in runs
    ]  # fmt: skip
    left_out = [f"{run.arm}-s{run.seed} {run.state}: {run.failure}" for run in runs if run.state != "finished"]
    families = []
    for name in dict.fromkeys(family_of(run.arm)[0] for run in runs):
        members = {word: f"{name}-{word}" for word in (TREATED, *CONTROLS)}
        by_arm = {arm: {r.seed: r for r in runs if r.arm == arm and r.state == "finished"} for arm in members.values()}
        for word in CONTROLS:
            treated, control = by_arm[members[TREATED]], by_arm[members[word]]
            wrong = {seed: unlike(treated[seed], control[seed]) for seed in treated.keys() & control.keys()}
            left_out += [f"{name} seed {seed} is not paired: {reason}" for seed, reason in wrong.items() if reason]
            seeds = tuple(sorted(seed for seed, reason in wrong.items() if not reason))
            if seeds:
                families.append(compared(name, members[TREATED], members[word], treated, control, seeds))
    return Joined(runs, families, left_out)


def read_run(folder: Path) -> Run:
    arm, seed = arm_and_seed(folder)
    manifest, start = folder / MANIFEST_FILE, folder / START_FILE
    failure = json.loads(manifest.read_text())["failure"] if manifest.exists() else "no manifest: killed, or it goes on"
    return Run(
        folder=folder, arm=arm, seed=seed, failure=failure,
        state="finished" if not failure else "failed" if manifest.exists() else "unfinished",
        initial=json.loads(start.read_text()).get("trained_digest", "") if start.exists() else "",
        prompts=tuple(prompts_digests(folder)),
        series=read_metrics(folder) if (folder / METRICS_FILE).exists() else {},
    )  # fmt: skip


def family_of(arm: str) -> tuple[str, str]:
    """(family, member): `int4-raw-none-on` -> (`int4-raw-none`, `on`); a name without such a word is its own family."""
    family, _, word = arm.rpartition("-")
    return (family, word) if word in (TREATED, *CONTROLS) else (arm, "")


def unlike(one: Run, other: Run) -> str:
    """Why two runs of one seed are no pair; empty where they are."""
    if not one.initial or one.initial != other.initial:
        return "they began from different weights, or do not say from which"
    if one.prompts != other.prompts:
        return "they saw different prompts"
    return ""


def compared(
    name: str, treated: str, control: str, on: dict[int, Run], off: dict[int, Run], seeds: tuple[int, ...]
) -> Family:
    figures = {}
    a, b = ({seed: runs[seed].figures() for seed in seeds} for runs in (on, off))
    for figure in FIGURES:
        left, right = ({s: found[figure] for s, found in side.items() if figure in found} for side in (a, b))
        difference = paired(left, right)
        if difference is not None:
            figures[figure] = (estimate(list(left.values())), estimate(list(right.values())), difference)
    return Family(name, treated, control, seeds, figures)
