"""Whether rollouts came from what the settings declare: the transform and the lag, found in the artifacts alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.artifacts import MANIFEST_FILE, START_FILE, arm_and_seed, read_handoffs
from experiments.config import ExperimentConfig, load
from experiments.evidence import Row
from experiments.rollouts import load_rollout, rollout_files
from miles_ext.weights import spell


def settings_of(arm_dir: Path) -> ExperimentConfig:
    """The settings of this arm as the experiment's config resolves them."""
    config, name = load(arm_dir.parent / "config.yaml"), arm_and_seed(arm_dir)[0]
    return config.for_arm(next(arm for arm in config.arms if arm.name == name))


def mismatch_rows(arm_dir: Path) -> list[Row]:
    """Declared transform and lag against start, handoffs and tokens; the last transformed weights made again."""
    config, seed = settings_of(arm_dir), arm_and_seed(arm_dir)[1]
    mismatch, start = config.rollout.mismatch, json.loads((arm_dir / START_FILE).read_text())
    declared, handoffs = mismatch.transform(seed), read_handoffs(arm_dir)
    wrong = [] if start["transform"] == declared else [f"start.json says {start['transform']}"]
    for capability in start["capabilities"]:
        served = capability["extra"].get("transform", spell({}))
        wrong += [] if served == spell(declared) else [f"{capability['engine_id']} served {served} at the start"]
    for line in handoffs:
        due = {} if line["step"] == config.steps else declared  # the last one only serves to judge what was trained
        found = [line["transform"], *(report["transform"] for report in line["reports"])]
        wrong += [f"version {line['version']}: transform {one}" for one in found if one != due]
    for file in rollout_files(arm_dir) if mismatch.lag else []:
        rollout = load_rollout(file)
        due = start["weight_version"] + max(0, rollout.step - mismatch.lag)
        versions = {int(v) for t in rollout.trajectories for v in set(t.completion.weight_version)}
        if versions != {due}:
            wrong.append(f"step {rollout.step}: weights of versions {sorted(versions)}, due {due}")
    detail = "; ".join(wrong[:5]) or f"{spell(declared)} beside a lag of {mismatch.lag}"
    rows = [Row("mismatch", len(handoffs), "handoffs", "as the settings declare", not wrong, detail)]
    finished = not json.loads((arm_dir / MANIFEST_FILE).read_text())["failure"]
    if declared and finished and mismatch.lag == 0:
        rows.append(resident_row(arm_dir, config, declared, handoffs))
    return rows


def resident_row(
    arm_dir: Path, config: ExperimentConfig, declared: dict[str, Any], handoffs: list[dict[str, Any]]
) -> Row:
    """The last transformed weights that an engine served, made again from the trained model on disk, byte for byte."""
    import torch

    from miles_ext.tensors import digest
    from rollout.embedded.decoder import Decoder
    from rollout.embedded.transform import apply

    target = Decoder.from_hf(arm_dir / "checkpoints" / "model", "cpu", getattr(torch, config.rollout.dtype))
    plain = digest(target.resident_tensors())
    target.load_hf_tensors(apply({name: t.clone() for name, t in target.named_hf_tensors()}, declared))
    made = digest(target.resident_tensors())
    served = next(line for line in handoffs if line["step"] == config.steps - 1)
    holds = {report["resident_digest"] for report in served["reports"]} == {made} != {plain}
    detail = f"version {served['version']} from the trained model and {spell(declared)}: {made}; untransformed {plain}"
    return Row("mismatch/resident", float(holds), "", "recomputed = resident, not the plain one", holds, detail)
