"""The control with a learning rate of zero: nothing is learnt, so trainer and sampler must score every token alike.

What remains between them is rounding. A scorer that reads other rows, another temperature or other weights than the
engine sampled from shows here at once, and nowhere else so plainly: in training, drift hides it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.artifacts import read_handoffs, verify_manifest
from experiments.config import ExperimentConfig
from experiments.evidence import Row, all_of, at_most, report
from experiments.mismatch.audit import settings_of
from experiments.tracking import read_metrics

STEPS = 3
# Largest mean |log p - log q| of a step, in nats, by the engine's dtype. The shipped models measure 3e-7 in float32;
# bfloat16 keeps 8 bits of a logit, so that passes which sum in another order differ by about 1e-2.
NOISE = {"float64": 2e-5, "float32": 2e-5, "bfloat16": 5e-2}
GAP = "train/train_rollout_logprob_abs_diff"


def control(config: ExperimentConfig) -> ExperimentConfig:
    """The experiment with a learning rate of 0, a few steps, under a name of its own; arms cannot raise the rate."""
    raw: dict[str, Any] = config.model_dump(mode="json")
    raw["arms"] = [arm | {"overrides": _without_rate(arm["overrides"])} for arm in raw["arms"]]
    raw["trainer"] |= {"lr": 0.0, "warmup_steps": 0}
    raw |= {"name": f"{config.name}-zero-lr", "steps": STEPS, "seeds": raw["seeds"][:1], "wandb_mode": "disabled"}
    return ExperimentConfig.model_validate(raw)


def _without_rate(overrides: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in overrides.items() if key not in ("trainer.lr", "trainer.warmup_steps")}


def zero_lr(config: ExperimentConfig, make: Callable[[ExperimentConfig], ExperimentConfig]) -> list[Row]:
    """Run the control with `make` and judge each arm. The gap of an arm that declares a mismatch is only reported."""
    made = make(control(config))
    return [row for arm in made.arms for row in arm_rows(made.run_dir / f"{arm.name}-s{made.seeds[0]}")]


def arm_rows(arm_dir: Path) -> list[Row]:
    """The gap of every step, that all handoffs sent one and the same weights, and that the arm ended well."""
    failure = verify_manifest(arm_dir)["failure"]
    settings = settings_of(arm_dir)
    mismatch = settings.rollout.mismatch
    gaps = read_metrics(arm_dir).get(GAP, {})
    worst = max(gaps.values(), default=math.nan) if all(map(math.isfinite, gaps.values())) else math.nan
    sent = {line["sent_digest"] for line in read_handoffs(arm_dir)}
    unit, about = "nats", f"largest mean of {len(gaps)} steps; engine in {settings.rollout.dtype}"
    name = f"{arm_dir.name}/zero_lr"
    gap = at_most(f"{name}/logprob_gap", worst, NOISE[settings.rollout.dtype], unit, about)
    if mismatch.transform(0) or mismatch.lag:
        gap = report(gap.name, worst, unit, f"{about}; a mismatch is declared, which is no noise")
    return [
        gap,
        all_of(f"{name}/weights", int(len(sent) == 1), 1, f"{len(sent)} different weights were handed over"),
        Row(f"{name}/finished", float(not failure), "", "the arm finished", not failure, failure),
    ]
