"""`bench scaling`: what sampling ahead of training gains, and what a second rollout worker does, on this machine.

The quickstart's model and task through the whole loop on Ray, in turns within each round: sampling and training one
after the other, sampling one step ahead, and two rollout workers. Seconds a step are wall time, since overlap is what
is measured: on a machine without a free core for each side there is nothing to gain, and the bound says so.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from experiments import cluster
from experiments.arms import run_arm
from experiments.artifacts import verify_manifest
from experiments.config import ExperimentConfig, load
from experiments.evidence import report
from experiments.tracking import read_metrics

SETTINGS = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
MODES = {
    "sync": [("max_staleness", "0")],
    "async": [("max_staleness", "1")],
    "two_workers": [("rollout.workers", "2")],
}
WARM = 2  # first steps of a run, not counted: pages, threads and the pipeline fill


def rows(quick: bool = False) -> list[dict[str, Any]]:
    """Measure; `quick` makes fewer rounds of fewer steps."""
    rounds, steps = (2, 6) if quick else (5, 14)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in MODES}
    with tempfile.TemporaryDirectory() as folder, cluster.session(3):
        for number in range(rounds):
            for name in MODES:
                found[name].append(measure(settings(name, steps, Path(folder) / f"{name}-{number}")))

    def ratio(above: str, below: str, figure: str) -> tuple[float, str]:
        pairs = zip(found[above], found[below], strict=True)
        each = [a[figure] / b[figure] for a, b in pairs]
        return statistics.median(each), f"{min(each):.2f} to {max(each):.2f} over {rounds} rounds"

    sync = found["sync"]
    bound = statistics.median((each["rollout"] + each["train"]) / max(each["rollout"], each["train"]) for each in sync)
    gain, spread = ratio("sync", "async", "step")
    two, two_spread = ratio("sync", "two_workers", "rollout")
    whole, whole_spread = ratio("sync", "two_workers", "step")
    about = f"{steps - WARM} steps a run, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    made = [
        report("scaling/async_over_sync", gain, "x", f"steps a second, max_staleness 1; {spread}; {about}"),
        report("scaling/async_bound", bound, "x", "(rollout + train) / the longer of them, without overlap"),
        report("scaling/workers_2_over_1", two, "x", f"sampling alone, two rollout workers; {two_spread}"),
        report("scaling/workers_2_over_1_step", whole, "x", f"whole steps; {whole_spread}"),
    ]
    for name, runs in found.items():
        seconds = [each["step"] for each in runs]
        made.append(
            report(f"scaling/{name}_step", statistics.median(seconds), "s", f"{min(seconds):.2f} to {max(seconds):.2f}")
        )
    return [row.as_json() for row in made]


def settings(name: str, steps: int, output_dir: Path) -> ExperimentConfig:
    common = [
        ("arms", "[{name: dflash2, kind: dflash2}]"), ("steps", str(steps)), ("output_dir", str(output_dir)),
        ("task.eval_problems", "1"), ("wandb_mode", "disabled"), ("checkpoint.every", "0"),
    ]  # fmt: skip
    return load(SETTINGS, [*common, *MODES[name]])


def measure(config: ExperimentConfig) -> dict[str, float]:
    """Mean seconds of a step, of its sampling and of its training. RuntimeError where the run failed."""
    arm = config.arms[0]
    run_arm(config, arm, 0, lambda line: None, debug=False)
    folder = config.run_dir / f"{arm.name}-s0"
    failure = verify_manifest(folder)["failure"]
    if failure:
        raise RuntimeError(f"the run to be measured failed: {failure}")
    series = read_metrics(folder)
    names = {"step": "perf/step_time", "rollout": "perf/rollout_time", "train": "perf/train_time"}
    counted = range(WARM, config.steps)
    return {name: statistics.mean(series[metric][step] for step in counted) for name, metric in names.items()}
