"""All arms of an experiment, one after another, then the comparison, the audit and the report."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

from ray.exceptions import RayTaskError
from rich.console import Console

from experiments import cluster
from experiments.artifacts import write_manifest
from experiments.audit import audit
from experiments.comparison import compare, print_comparison
from experiments.config import ArmConfig, ExperimentConfig, save
from experiments.loop import train_arm
from experiments.progress import Follower
from experiments.report import write_report
from experiments.tracking import Tracker


def run(config: ExperimentConfig, console: Console, *, debug: bool = False) -> int:
    """Run the experiment; 0 where every arm finished and the audit holds.

    Prompts, seeds and initial weights are the same in all arms. An arm that fails is named and the others go on.
    """
    with cluster.session(config.cpus), Follower(console) as follower:
        cluster.require_room(config)
        config = save(config)
        for seed in config.seeds:
            for arm in config.arms:
                run_arm(config, arm, seed, follower.line, debug=debug)
    comparison = compare(config.run_dir)
    sound = audit(config.run_dir) == 0
    page = write_report(config.run_dir)
    print_comparison(comparison, console)
    finished = all(arm["state"] == "finished" for arm in comparison["arms"])
    show_paths(config, page, console)
    if not (finished and sound):
        console.print("NOT SOUND: an arm failed or the audit found something; both are named above", style="red")
    return 0 if finished and sound else 1


def run_arm(config: ExperimentConfig, arm: ArmConfig, seed: int, say: Callable[[str], None], *, debug: bool) -> None:
    """One arm and seed; whatever ends it, its files are closed, listed and kept."""
    folder = config.run_dir / f"{arm.name}-s{seed}"
    mine = config.for_arm(arm)
    tracker = Tracker(
        folder, experiment=config.name, arm=arm.name, seed=seed, config=mine.model_dump(mode="json"),
        wandb_mode=config.wandb_mode, project=config.wandb_project, tags=tags(mine),
    )  # fmt: skip
    failure = "interrupted"
    try:
        train_arm(mine, arm, seed, folder, tracker, say)
        failure = ""
    except Exception as error:  # noqa: BLE001  whatever it was, the other arms still have a run to make
        cause = error.cause if isinstance(error, RayTaskError) else error  # what a worker raised, without its trace
        failure = " ".join(f"{type(cause).__name__}: {cause}".split())
        say(f"arm {folder.name} FAILED: {failure}")
        if debug:
            say(traceback.format_exc())
    finally:
        tracker.finish(failed=bool(failure))
        write_manifest(folder, failure)


def tags(config: ExperimentConfig) -> tuple[str, ...]:
    """Words to find a run by."""
    sampling, estimator = config.sampling, config.trainer.estimator
    law = f"top-k {sampling.top_k} top-p {sampling.top_p}" if sampling.spec(0).is_filtered else "unfiltered"
    return (config.task.name, config.model.target.name, law, estimator.mode, f"centering {estimator.centering}")


def show_paths(config: ExperimentConfig, page: Path, console: Console) -> None:
    runs = sorted(config.run_dir.resolve().glob("*/wandb/*run-*"))
    lines = [f"report: {page.resolve()}", f"run:    {config.run_dir.resolve()}"]
    lines += [f"W&B:    {path}" for path in runs]
    if any(path.name.startswith("offline") for path in runs):
        lines.append("        upload them with: wandb sync " + str(config.run_dir.resolve() / "*/wandb/offline-run-*"))
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
