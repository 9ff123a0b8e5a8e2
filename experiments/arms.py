"""All arms of an experiment, one after another, then the comparison, the audit and the report."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ray.exceptions import RayTaskError
from rich.console import Console

from experiments import checkpoints, cluster
from experiments.artifacts import write_manifest
from experiments.audit import audit
from experiments.comparison import compare, print_comparison
from experiments.config import ArmConfig, ExperimentConfig
from experiments.evidence import print_rows
from experiments.loop import train_arm
from experiments.progress import Follower
from experiments.report import write_report
from experiments.resume import opened
from experiments.tracking import Tracker
from experiments.zero_lr import zero_lr


def run(config: ExperimentConfig, console: Console, *, resume: str = "never", debug: bool = False) -> int:
    """Run the experiment; 0 where every arm finished and the audit holds.

    Prompts, seeds and initial weights are the same in all arms. An arm that fails is named and the others go on.
    resume: see `experiments.resume.opened`; arms that finished are not run again.
    """
    with cluster.session(config.cpus):
        cluster.require_room(config)
        with opened(config, resume) as config:
            run_arms(config, console, debug=debug)
            return conclude(config, console)


def run_arms(config: ExperimentConfig, console: Console, *, debug: bool = False) -> None:
    with Follower(console) as follower:
        for seed in config.seeds:
            for arm in config.arms:
                run_arm(config, arm, seed, follower.line, debug=debug)


def run_control(config: ExperimentConfig, console: Console, *, debug: bool = False) -> int:
    """The zero-learning-rate control of `config`; 0 where trainer and sampler agree but for rounding."""

    def make(control: ExperimentConfig) -> ExperimentConfig:
        with cluster.session(control.cpus):
            cluster.require_room(control)
            with opened(control) as made:
                run_arms(made, console, debug=debug)
                return made

    rows = zero_lr(config, make)
    print_rows(rows, f"zero learning rate, {config.name}")
    return int(not all(row.passed for row in rows))


def conclude(config: ExperimentConfig, console: Console) -> int:
    """Compare, audit and report what the arms left on disk."""
    comparison = compare(config.run_dir)
    sound = audit(config.run_dir) == 0
    page = write_report(config.run_dir)
    print_comparison(comparison, console)
    finished = all(arm["state"] == "finished" for arm in comparison["arms"])
    show_paths(config, page, console)
    if not (finished and sound):
        console.print("NOT SOUND: an arm failed or the audit found something; both are named above", style="red")
    return 0 if finished and sound else 1


def run_arm(
    config: ExperimentConfig, arm: ArmConfig, seed: int, say: Callable[[str], None], *, debug: bool, **sides: Any
) -> None:
    """One arm and seed, from where it stands; whatever ends it, its files are closed, listed and kept.

    sides: `make_pool` and `make_trainer` of `train_arm`.
    """
    folder = config.run_dir / f"{arm.name}-s{seed}"
    if checkpoints.finished(folder):
        say(f"arm {folder.name} is finished and not run again")
        return
    mine, failure, opened_files = config.for_arm(arm), "interrupted", ExitStack()
    try:
        start = checkpoints.newest(folder, say)
        checkpoints.cut_back(folder, start, mine.audited_step, mine.checkpoint.keep)
        if start.step:
            say(f"arm {folder.name} goes on after step {start.step} of {mine.steps}")
        tracker = Tracker(
            folder, experiment=config.name, arm=arm.name, seed=seed, config=mine.model_dump(mode="json"),
            wandb_mode=config.wandb_mode, project=config.wandb_project, tags=tags(mine),
            wandb_id=start.wandb_id or None,
        )  # fmt: skip
        opened_files.callback(lambda: tracker.finish(failed=bool(failure)))
        checkpoints.begin(folder, tracker.wandb_id)
        train_arm(mine, arm, seed, folder, tracker, say, start, **sides)
        failure = ""
    except Exception as error:  # noqa: BLE001  whatever it was, the other arms still have a run to make
        cause = error.cause if isinstance(error, RayTaskError) else error  # what a worker raised, without its trace
        failure = " ".join(f"{type(cause).__name__}: {cause}".split())
        say(f"arm {folder.name} FAILED: {failure}")
        if debug:
            say(traceback.format_exc())
    finally:
        try:
            opened_files.close()
            write_manifest(folder, failure)
        except OSError as error:  # a full disk: the arm has no manifest, and so is not finished
            say(f"arm {folder.name} has no manifest: {error}; make room, then --resume auto goes on with it")


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
