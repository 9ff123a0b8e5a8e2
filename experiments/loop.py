"""The algorithm: sample, reward, train, hand the weights over; evaluated before the first update and after the last."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments import checkpoints
from experiments.ahead import FIRST_VERSION, Ahead, staleness_figures
from experiments.alarms import Alarms
from experiments.artifacts import record_start
from experiments.checkpoints import Point
from experiments.config import ArmConfig, ExperimentConfig
from experiments.delivery import Delivery
from experiments.figures import handoff_figures, rollout_figures
from experiments.progress import step_line
from experiments.questions import Questions
from experiments.rollouts import rollout_file, save_rollout
from experiments.tracking import Tracker, read_metrics
from miles_ext.errors import SupportError, TrainingError
from miles_ext.records import Status, Trajectory
from rollout.pool import RolloutPool
from trainer.step import rollout_advantages
from trainer.worker import TrainerGroup


def train_arm(
    config: ExperimentConfig, arm: ArmConfig, seed: int, folder: Path, tracker: Tracker, say: Callable[[str], None],
    start: Point, make_pool: type[RolloutPool] = RolloutPool, make_trainer: type[TrainerGroup] = TrainerGroup,
) -> None:  # fmt: skip
    """Run one arm with one seed from `start`; everything worth keeping is in `folder` as soon as it exists.

    make_pool, make_trainer: what stands for the two sides where they are no Ray actors (experiments/local.py).
    """
    model, spec, name = config.model, config.sampling.spec(0), f"{arm.name}-s{seed}"
    alarms = Alarms(config.alarms, config.task.prompts, name, say, read_metrics(folder))
    with (
        closing(make_pool(config.rollout, arm.kind, model.target, model.draft, spec)) as pool,
        closing(make_trainer(config.trainer, model.target, seed)) as trainer,
    ):
        pool.start()  # raises where an engine cannot prove that it samples `spec` exactly in this arm
        ready = checkpoints.restore(trainer, folder, start)
        delivery = Delivery(trainer, pool, config, seed, folder)
        served = delivery.prepare(start.step - 1, start.version, again=start.step > 0)()
        capabilities = pool.capability()
        drafts = {capability.draft_digest for capability in capabilities}
        held_out, before = Questions.held_out(config, seed), math.nan
        if start.step == 0:
            record_start(folder, delivery.manifest, capabilities, trained_digest(trainer, config))
            before = evaluate(pool, held_out)
        else:
            checkpoints.require_same(folder, delivery.manifest, drafts)

        with Ahead(pool, config, seed, capabilities[0].vocab_size, start.step, ready, served) as ahead:
            for step in range(start.step, config.steps):
                started = time.perf_counter()
                sampled = ahead.take(step)
                trajectories, waited = sampled.trajectories, time.perf_counter()
                metrics = rollout_figures(trajectories, sampled.seconds) | staleness_figures(trajectories, step)
                audited = step == config.audited_step
                keep(folder, config, step, trajectories, audited=audited)

                training = time.perf_counter()
                probe = folder / "audit" if audited else None
                with counted(tracker, step, metrics):
                    metrics |= trainer.train(
                        trajectories, temperature=spec.temperature, step=step, probe=probe,
                        skips=config.trainer.max_skipped_updates - alarms.skipped,
                    )  # fmt: skip
                trained = time.perf_counter()
                reports = ahead.hand_over(delivery.prepare(step, FIRST_VERSION + step + 1))
                handed_over = time.perf_counter()

                metrics |= handoff_figures(reports, drafts) | {
                    "perf/rollout_time": sampled.seconds,
                    "perf/wait_time": waited - started,
                    "perf/train_time": trained - training,
                    "perf/update_weights_time": handed_over - trained,
                    "perf/step_time": handed_over - started,
                    "perf/rollout_rss_mb": pool.rss_mb(),
                }
                if step == 0:
                    metrics["eval/reward"] = before
                if step == config.steps - 1:  # a run of one step keeps what it became
                    metrics["eval/reward"] = metrics["eval/trained_reward"] = ahead.call(evaluate, pool, held_out)
                    if delivery.alters:  # what was trained, where rollouts come from something else
                        ahead.call(delivery.hand_over_plain, step + 1, FIRST_VERSION + step + 2)
                        metrics["eval/trained_reward"] = ahead.call(evaluate, pool, held_out)
                metrics |= alarms.judge(metrics)
                tracker.log(step, metrics)
                say(step_line(name, step + 1, config.steps, metrics))
                if checkpoints.due(config.checkpoint, step + 1, config.steps):
                    waiting = ahead.settled()
                    checkpoints.save(trainer, folder, step + 1, tracker.wandb_id, config.checkpoint.keep, waiting)
        trainer.save_hf(folder / checkpoints.FOLDER / "model")


@contextmanager
def counted(tracker: Tracker, step: int, metrics: dict[str, float]) -> Iterator[None]:
    """An update that ends the run because it was not finite is in the metrics all the same."""
    try:
        yield
    except TrainingError:
        tracker.log(step, metrics | {"train/skipped_updates": 1.0, "alarm/non_finite": 1.0})
        raise


def trained_digest(trainer: TrainerGroup, config: ExperimentConfig) -> str:
    """Of the weights as they are trained: arms that sample in another dtype, or transformed ones, are paired by it."""
    own = "float64" if config.trainer.dtype == "float64" else "float32"  # bfloat16 trains float32 master weights
    return trainer.share(FIRST_VERSION, own)[0].digest


def evaluate(pool: RolloutPool, asked: Questions) -> float:
    """Mean reward. SupportError where a response was cut off for want of a law: it is no wrong answer."""
    completions = pool.generate(asked.requests)
    aborted = [i for i, completion in enumerate(completions) if completion.finish_reason == "abort"]
    if aborted:
        raise SupportError(
            f"evaluation: {len(aborted)} of {len(completions)} responses met logits that are not finite, first "
            f"{asked.requests[aborted[0]].request_id!r}; look at the weights, or lower trainer.lr"
        )
    return float(np.mean(asked.rewards(completions)))


def keep(folder: Path, config: ExperimentConfig, step: int, trajectories: list[Trajectory], *, audited: bool) -> None:
    """Write the rollout before it is trained on, so that one which cannot be is there to look at, laws and all."""
    broken = {t.group for t in trajectories if t.completion.worst_status is not Status.OK}
    kept = np.array([i for i, t in enumerate(trajectories) if t.group not in broken], np.int64)
    advantages = rollout_advantages(trajectories, kept, config.trainer) if len(kept) else np.zeros(len(trajectories))
    if config.save_support == "audited" and not (audited or broken):
        trajectories = [replace(t, completion=replace(t.completion, support=None)) for t in trajectories]
    save_rollout(rollout_file(folder, step), step, trajectories, advantages)
