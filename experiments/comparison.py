"""Arm beside arm: comparison.json from metrics and artifacts, the proof that the arms are paired, a table."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.alarms import ADVICE, alarms_in
from experiments.artifacts import MANIFEST_FILE, START_FILE, arm_and_seed, arm_dirs, read_handoffs
from experiments.evidence import figure
from experiments.rollouts import load_rollout, rollout_files
from experiments.tracking import METRICS_FILE, read_metrics

COMPARISON_FILE = "comparison.json"
# Column of the tables: heading, summary of an arm, figure of that summary.
HEADLINES = (
    ("eval before", "eval", "before"),
    ("eval after", "eval", "after"),
    ("late reward", "reward", "last_quarter"),
    ("tokens/s", "tokens_per_s", "median"),
    ("accept length", "accept_length", "median"),
    ("logprob gap", "logprob_gap", "median"),
    ("correction norm", "correction_norm", "median"),
    ("handoff s", "handoff_seconds", "median"),
)  # fmt: skip


def compare(run_dir: Path) -> dict[str, Any]:
    """Summarise every arm of a run, failed ones included, and write comparison.json."""
    arms = [summarise(arm_dir) for arm_dir in arm_dirs(run_dir)]
    comparison = {"experiment": run_dir.name, "arms": arms, "pairing": pairing(arms)}
    text = json.dumps(_spell(comparison), indent=1, allow_nan=False)
    (run_dir / COMPARISON_FILE).write_text(text + "\n")
    return comparison


def summarise(arm_dir: Path) -> dict[str, Any]:
    """One arm and seed: state, curves in figures, and the digests that pairing is proved by."""
    arm, seed = arm_and_seed(arm_dir)
    series = read_metrics(arm_dir) if (arm_dir / METRICS_FILE).exists() else {}
    state, failure = _state(arm_dir)
    start = json.loads((arm_dir / START_FILE).read_text()) if (arm_dir / START_FILE).exists() else {}
    capabilities = start.get("capabilities", [])
    rewards = series.get("rollout/raw_reward", {})
    return {
        "name": arm_dir.name, "arm": arm, "seed": seed, "state": state, "failure": failure,
        "steps": len(rewards), "non_finite": int(sum(series.get("non_finite", {}).values())),
        "skipped_updates": int(sum(series.get("train/skipped_updates", {}).values())), "alarms": alarms_in(series),
        "eval": _before_after(series.get("eval/reward", {}), finished=state == "finished"),
        "reward": _spread(rewards) | {"last_quarter": _last_quarter(rewards)},
        "tokens_per_s": _spread(series.get("rollout/tokens_per_s", {})),
        "accept_length": _spread(series.get("spec/accept_length", {})),
        "logprob_gap": _spread(series.get("train/train_rollout_logprob_abs_diff", {})),
        "correction_norm": _spread(series.get("sc/correction_norm", {})),
        "grad_norm": _spread(series.get("train/grad_norm", {})),
        "handoff_seconds": _spread(series.get("handoff/seconds", {})),
        "handoffs": len(read_handoffs(arm_dir)),
        "initial_weights_digest": start.get("trained_digest", ""),
        "draft_digests": sorted({capability["draft_digest"] for capability in capabilities} - {""}),
        "prompts_digests": prompts_digests(arm_dir),
    }  # fmt: skip


def prompts_digests(arm_dir: Path) -> list[str]:
    """One SHA-256 a step over the prompts that were sampled, in order: prompt id, group and token ids."""
    digests = []
    for file in rollout_files(arm_dir):
        hasher = hashlib.sha256()
        for trajectory in load_rollout(file).trajectories:
            ids = trajectory.completion.prompt_ids
            hasher.update(np.array([trajectory.prompt_id, trajectory.group, len(ids)], "<i8").tobytes())
            hasher.update(ids.astype("<i4").tobytes())
        digests.append(hasher.hexdigest())
    return digests


def pairing(arms: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether the arms of each seed began from the same weights and saw the same prompts, step by step.

    An arm that ended early is held to the steps that it made; an arm without artifacts proves nothing and fails.
    """
    wrong: list[str] = []
    for seed in sorted({arm["seed"] for arm in arms}):
        first, *others = [arm for arm in arms if arm["seed"] == seed]
        for arm in (first, *others):
            if not arm["initial_weights_digest"]:
                wrong.append(f"{arm['name']} has no digest of its initial weights")
            if not arm["prompts_digests"]:
                wrong.append(f"{arm['name']} has no rollouts")
        for arm in others:
            if arm["initial_weights_digest"] != first["initial_weights_digest"]:
                wrong.append(f"{arm['name']} and {first['name']} began from different weights")
            steps = zip(arm["prompts_digests"], first["prompts_digests"], strict=False)
            differing = [step for step, (a, b) in enumerate(steps) if a != b]
            if differing:
                wrong.append(f"{arm['name']} and {first['name']} saw different prompts at rollouts {differing[:8]}")
    compared = [min(len(a["prompts_digests"]) for a in arms if a["seed"] == arm["seed"]) for arm in arms]
    return {"paired": not wrong, "wrong": wrong, "steps_compared": min(compared, default=0)}


def print_comparison(comparison: dict[str, Any], console: Console | None = None) -> None:
    console = console or Console()
    table = Table(title=comparison["experiment"], title_justify="left", header_style="bold", box=None, pad_edge=False)
    table.add_column("arm", no_wrap=True)
    for heading, _, _ in HEADLINES:
        table.add_column(heading, justify="right", min_width=min(8, len(heading)))
    for arm in comparison["arms"]:
        cells = [_cell(arm[summary][name]) for _, summary, name in HEADLINES]
        table.add_row(arm["name"], *cells, style=None if arm["state"] == "finished" else "red")
    console.print(table)
    for arm in comparison["arms"]:
        if arm["state"] != "finished":
            console.print(
                f"{arm['name']} {arm['state']} after {arm['steps']} steps: {arm['failure']}", style="red", markup=False
            )
        for line in alarm_lines(arm):
            console.print(line, style="yellow", markup=False, highlight=False)
    console.print(pairing_sentence(comparison["pairing"]), markup=False, highlight=False)


def alarm_lines(arm: dict[str, Any]) -> list[str]:
    """One sentence for each alarm that rang in an arm."""
    return [
        f"{arm['name']} alarm {word}: {len(steps)} steps, first {steps[0]}, last {steps[-1]}; {ADVICE[word]}"
        for word, steps in arm["alarms"].items()
    ]


def ending(arm: dict[str, Any]) -> str:
    return f"{arm['name']} {arm['state']} after {arm['steps']} steps: {arm['failure']}"


def pairing_sentence(pair: dict[str, Any]) -> str:
    if not pair["paired"]:
        return "NOT PAIRED: " + "; ".join(pair["wrong"])
    return (
        f"paired: same initial weights and same prompts in all arms over {pair['steps_compared']} rollouts, by digest"
    )


def _state(arm_dir: Path) -> tuple[str, str]:
    file = arm_dir / MANIFEST_FILE
    if not file.exists():
        return "unfinished", "no manifest was written: the run goes on, or was killed"
    failure = json.loads(file.read_text())["failure"]
    return ("failed" if failure else "finished"), failure


def _before_after(points: dict[int, float], *, finished: bool) -> dict[str, float | None]:
    """Of a single point: a finished run has one step and says what it became, any other how it began."""
    if len(points) < 2:
        (only,) = points.values() or (None,)
        return {"before": None if finished else only, "after": only if finished else None, "gain": None}
    before, after = points[min(points)], points[max(points)]
    return {"before": before, "after": after, "gain": after - before}


def _spread(points: dict[int, float]) -> dict[str, float | None]:
    """Median, range and ends over the steps; non-finite values stay and show."""
    if not points:
        return dict.fromkeys(("first", "last", "median", "min", "max"))
    values = np.array([points[step] for step in sorted(points)])
    named = {
        "first": values[0],
        "last": values[-1],
        "median": np.median(values),
        "min": values.min(),
        "max": values.max(),
    }
    return {name: float(value) for name, value in named.items()}


def _last_quarter(points: dict[int, float]) -> float | None:
    values = [points[step] for step in sorted(points)]
    return float(np.mean(values[-max(1, len(values) // 4) :])) if values else None


def _cell(value: float | None) -> str:
    return "-" if value is None else figure(value, 3)


def _spell(value: Any) -> Any:
    """JSON has no NaN: non-finite numbers become words, as in metrics.jsonl."""
    if isinstance(value, dict):
        return {name: _spell(item) for name, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_spell(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
