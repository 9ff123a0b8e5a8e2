"""The trainer's own logit gradient of one update, against an independent float64 recomputation from artifacts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from experiments.evidence import Row, at_most, must_fail, report
from experiments.oracle import RHO_MAX, TAIL_FLOOR, Gradients, Token, token_gradients
from experiments.rollouts import Rollout, load_rollout, rollout_file
from experiments.tracking import read_metrics

# Largest difference of a coordinate, in units of scale |A| / T: rounding of the trainer's float32 logits and laws. It
# adds up over the layers: a target of 30 has probabilities that are off by 1.2e-5 at most in 200 rows.
TOLERANCE, LAYERS = 2e-5, 10
EDGE = 1e-4  # tokens whose log ratio lies this near a bound of `mis` may take either side, and are counted
MAX_EDGE_FRACTION = 0.05
# Nats between trainer and engine on a sampled token: below it they differ by rounding, and centering has no work.
ON_POLICY_GAP = 1e-5


@dataclass(frozen=True, slots=True)
class Probe:
    """See trainer.probe: n tokens of one update. settings: the estimator's."""

    logit_grad: NDArray[np.float32]
    trajectory: NDArray[np.int64]
    token: NDArray[np.int64]
    advantage: NDArray[np.float32]
    scale: NDArray[np.float32]
    temperature: float
    settings: dict[str, Any]
    step: int


def read_probe(arm_dir: Path) -> Probe:
    file = arm_dir / "audit" / "probe.safetensors"
    if not file.exists():
        raise ValueError(f"{file} does not exist: the run was too short to reach the step that is probed")
    with safe_open(file, "numpy") as opened:
        about = json.loads(opened.metadata()["probe"])
        columns = {
            name: opened.get_tensor(name) for name in ("logit_grad", "trajectory", "token", "advantage", "scale")
        }
    return Probe(**columns, temperature=about["temperature"], settings=about["estimator"], step=about["step"])


def probe_rows(arm_dir: Path) -> list[Row]:
    """The trainer's gradient equals the one its config claims; the other one and the sign-flipped one do not."""
    probe = read_probe(arm_dir)
    rollout = load_rollout(rollout_file(arm_dir, probe.step))
    logits = recompute_logits(arm_dir / "audit" / "weights", rollout, probe)
    found = [reference(probe, rollout, row, logits[row]) for row in range(len(probe.token))]
    usable = np.array([gradients.edge > EDGE for gradients in found]) & (probe.advantage != 0)
    tolerance = tolerance_of(arm_dir / "audit" / "weights")
    unit = np.abs(probe.scale.astype(float) * probe.advantage) / probe.temperature

    def distance(name: str) -> float:
        expected = np.stack([getattr(gradients, name) for gradients in found]) * probe.scale[:, None].astype(float)
        worst = np.abs(probe.logit_grad - expected).max(1)[usable] / unit[usable]
        return float(worst.max()) if len(worst) else np.nan

    mode = probe.settings["mode"]
    claimed, other = ("centered", "uncentered") if probe.settings["centering"] == "on" else ("uncentered", "centered")
    about = f"{int(usable.sum())} tokens of step {probe.step}, mode {mode}, logits in float64 from the saved weights"
    gap = float(np.abs(rollout.advantages[probe.trajectory] - probe.advantage).max())
    on_bound = float(np.mean([gradients.edge <= EDGE for gradients in found]))
    rows = [
        at_most(f"gradient/{claimed}", distance(claimed), tolerance, "", about),
        at_most("gradient/advantages", gap, 1e-5, "", "the probe's against the rollout's"),
    ]
    corrections = np.array([np.abs(gradients.centered - gradients.uncentered).max() for gradients in found])
    at_work = (corrections * np.abs(probe.scale))[usable] / unit[usable]
    at_work = at_work.max(initial=0) > 2 * tolerance
    on_policy = read_metrics(arm_dir)["train/train_rollout_logprob_abs_diff"][probe.step] < ON_POLICY_GAP
    for name, what in ((other, f"the {other} gradient instead"), ("flipped", "correction of the wrong sign")):
        if at_work or (mode == "none" and not on_policy):
            rows.append(must_fail(at_most(f"gradient/control_{name}", distance(name), tolerance), what))
        else:  # on-policy, or no ratio of these tokens left its bounds: the correction is zero and no control can tell
            detail = f"{what}; mode {mode} corrects nothing here"
            rows.append(report(f"gradient/control_{name}", distance(name), "", detail))
    if mode == "mis":
        detail = "left out: rounding decides their weight"
        rows.append(at_most("gradient/on_a_bound", on_bound, MAX_EDGE_FRACTION, "of tokens", detail))
    return rows


def tolerance_of(weights: Path) -> float:
    """TOLERANCE up to LAYERS layers, and in proportion to their number beyond."""
    layers = json.loads((weights / "config.json").read_text())["num_hidden_layers"]
    return TOLERANCE * max(1.0, layers / LAYERS)


def recompute_logits(weights: Path, rollout: Rollout, probe: Probe) -> dict[int, NDArray[np.float64]]:
    """Float64 logits [V] of each probed token by transformers, one trajectory at a time: row t comes from P + t - 1.

    On a GPU where there is one: a model of 135 million parameters takes 14 s a trajectory on one core.
    """
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded: Any = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float64, attn_implementation="eager")
    model = loaded.to(device).eval()
    found: dict[int, NDArray[np.float64]] = {}
    for index in np.unique(probe.trajectory):
        completion, rows = rollout.trajectories[index].completion, np.flatnonzero(probe.trajectory == index)
        ids = torch.from_numpy(np.concatenate([completion.prompt_ids, completion.response_ids]).astype(np.int64))
        places = torch.from_numpy(len(completion.prompt_ids) + probe.token[rows] - 1)
        with torch.no_grad():
            logits = model(ids[None].to(device), logits_to_keep=places.to(device)).logits[0].cpu().numpy()
        found |= dict(zip(rows.tolist(), logits, strict=True))
    return found


def reference(probe: Probe, rollout: Rollout, row: int, logits: NDArray[np.float64]) -> Gradients:
    completion = rollout.trajectories[probe.trajectory[row]].completion
    t = int(probe.token[row])
    if completion.support is None:
        raise ValueError(f"step {probe.step}: the probed rollout has no support rows")
    entries = slice(int(completion.support.offsets[t]), int(completion.support.offsets[t + 1]))
    token = Token(
        logits=logits,
        sampled=int(completion.response_ids[t]),
        sampled_logprob=float(completion.support.sampled_logprobs[t]),
        ids=completion.support.token_ids[entries],
        logprobs=completion.support.logprobs[entries],
        kind=completion.support.kind,
    )
    bounds = {name: probe.settings[name] for name in ("tis_clip", "mis_low", "mis_high")}
    return token_gradients(
        token, float(probe.advantage[row]), probe.temperature, probe.settings["mode"],
        tail_floor=TAIL_FLOOR, rho_max=RHO_MAX, **bounds,
    )  # fmt: skip
