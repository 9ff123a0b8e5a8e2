"""Re-checks a finished run from its artifacts alone. Exit code 1 where anything does not hold."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments.alarms import alarms_in
from experiments.artifacts import (
    AUDIT_FILE,
    MANIFEST_FILE,
    RESUME_FILE,
    START_FILE,
    arm_dirs,
    read_handoffs,
    sha256,
    verify_manifest,
)
from experiments.comparison import pairing, summarise
from experiments.evidence import Row, all_of, at_least, at_most, print_rows, report, write_json
from experiments.gradient_probe import ON_POLICY_GAP, probe_rows, read_probe
from experiments.mismatch.audit import mismatch_rows, settings_of
from experiments.rollouts import load_rollout, rollout_files
from experiments.tracking import read_metrics
from miles_ext.errors import SupportError
from miles_ext.records import MASS_TOLERANCE, Commit, Trajectory

# An engine's float32 laws differ from the trainer's by about 1e-6: below ten times that a correction is not at work.
CORRECTION_FLOOR = 1e-5
# Nats between trainer and engine on a sampled token, an update's drift included. The centred gradient of complete
# supports does not depend on the trainer's logits at all, so a trainer that reads the wrong rows shows here only.
MAX_LOGPROB_GAP = 0.25
MIN_HANDOFFS = 2
COMMITS = {
    "regular": {Commit.PREFILL, Commit.PLAIN},
    "dflash": {Commit.PREFILL, Commit.DRAFT, Commit.REJECT_BONUS, Commit.FULL_BONUS},
    "dflash2": {Commit.PREFILL, Commit.DRAFT, Commit.REJECT_BONUS, Commit.FULL_BONUS},
}


def audit(run_dir: Path) -> int:
    """Check every arm of a run, print the rows, write <arm>/audit.json; 0 when all hold."""
    rows = audit_rows(run_dir)
    print_rows(rows, f"audit of {run_dir.name}")
    return int(not all(row.passed for row in rows))


def audit_rows(run_dir: Path) -> list[Row]:
    rows = checked("pairing", pairing_rows, run_dir)
    for arm_dir in arm_dirs(run_dir):
        found = arm_rows(arm_dir)
        write_json(arm_dir / AUDIT_FILE, f"python -m experiments audit {run_dir}", found)
        rows += found
    return rows


def arm_rows(arm_dir: Path) -> list[Row]:
    checks = {
        "manifest": manifest_rows, "metadata": metadata_rows, "handoffs": handoff_rows,
        "mismatch": mismatch_rows, "training": training_rows, "gradient": probe_rows,
    }  # fmt: skip
    rows = [row for name, check in checks.items() for row in checked(name, check, arm_dir)]
    return [replace(row, name=f"{arm_dir.name}/{row.name}") for row in rows]


def checked(name: str, check: Callable[[Path], list[Row]], folder: Path) -> list[Row]:
    """The check's rows; where an artifact is missing or broken, one failed row that says so."""
    try:
        return check(folder)
    except (OSError, ValueError, KeyError) as error:
        detail = f"{type(error).__name__}: {error}"
        return [Row(name, math.nan, "", "artifacts are there and sound", False, detail)]


def pairing_rows(run_dir: Path) -> list[Row]:
    """All arms of a seed began from the same weights and saw the same prompts."""
    arms = [summarise(arm_dir) for arm_dir in arm_dirs(run_dir)]
    found = pairing(arms)
    detail = "; ".join(found["wrong"]) or f"{len(arms)} arms, same initial weights and prompts, by digest"
    return [Row("pairing", found["steps_compared"], "rollouts", "all arms of a seed alike", found["paired"], detail)]


def manifest_rows(arm_dir: Path) -> list[Row]:
    manifest = verify_manifest(arm_dir)
    files, failure = len(manifest["files"]), manifest["failure"]
    digest = f"manifest SHA-256 {sha256(arm_dir / MANIFEST_FILE)}"
    return [
        all_of("manifest", files, files, digest, "files"),
        Row("finished", float(not failure), "", "the arm finished", not failure, failure),
    ]


def metadata_rows(arm_dir: Path) -> list[Row]:
    """Every generated row: commit kinds, versions, engine and draft digests, and its law where it was kept on disk."""
    start = json.loads((arm_dir / START_FILE).read_text())
    (vocab,), (kind,), (draft,) = (
        {capability[name] for capability in start["capabilities"]} for name in ("vocab_size", "arm", "draft_digest")
    )
    handoffs = [(line["step"], line["version"]) for line in read_handoffs(arm_dir)]
    staleness = settings_of(arm_dir).max_staleness
    total, laws, kinds, wrong = 0, 0, dict.fromkeys(Commit, 0), list[str]()
    for file in rollout_files(arm_dir):
        rollout = load_rollout(file)
        due = [version for step, version in handoffs if step < rollout.step - staleness]
        served = max([start["weight_version"], *due])
        for index, trajectory in enumerate(rollout.trajectories):
            completion = trajectory.completion
            total += len(completion)
            laws += len(completion.support) if completion.support is not None else 0
            for commit in completion.commit.tolist():
                kinds[Commit(commit)] += 1
            found = complaints(trajectory, vocab, COMMITS[kind], draft, served)
            wrong += [f"step {rollout.step} trajectory {index}: {complaint}" for complaint in found]
    counted = ", ".join(f"{count:,} {commit.name}" for commit, count in kinds.items() if count)
    detail = "; ".join([f"{counted}; laws of {laws:,} rows on disk and whole", *wrong[:5]])
    return [Row("metadata", total, "rows", "every row valid", bool(laws) and not wrong, detail)]


def complaints(trajectory: Trajectory, vocab: int, commits: set[Commit], draft: str, served: int) -> list[str]:
    """Everything about one response that does not hold."""
    completion, wrong = trajectory.completion, []
    try:
        completion.check(vocab)
    except SupportError as error:
        wrong.append(str(error))
    rows = completion.support
    if rows is not None and rows.kind == "complete":
        spans = zip(rows.offsets, rows.offsets[1:], strict=False)
        off = [abs(math.fsum(np.exp(rows.logprobs[a:b].astype(float))) - 1) for a, b in spans]
        if max(off, default=0) > MASS_TOLERANCE:
            wrong.append(f"mass is off by {max(off):.2g} at row {int(np.argmax(off))}")
    kinds = completion.commit.tolist()
    if not set(kinds) <= commits or Commit.PREFILL not in kinds[:1]:
        wrong.append(f"commit kinds {sorted(set(kinds))}, first {kinds[:1]}")
    if (completion.weight_version != served).any():
        wrong.append(f"weight versions {sorted(set(completion.weight_version.tolist()))}, served {served}")
    if completion.draft_digest != draft:
        wrong.append(f"draft digest {completion.draft_digest!r}, at start {draft!r}")
    if len(trajectory.loss_mask) != len(completion):
        wrong.append(f"loss mask of {len(trajectory.loss_mask)} for {len(completion)} tokens")
    return wrong


def handoff_rows(arm_dir: Path) -> list[Row]:
    """What was sent was received, replicas agree, and the draft's bytes are those of the start; so after a resume."""
    handoffs, again = read_handoffs(arm_dir), read_handoffs(arm_dir, RESUME_FILE)
    start = json.loads((arm_dir / START_FILE).read_text())
    drafts = {capability["draft_digest"] for capability in start["capabilities"]}
    speculative = start["capabilities"][0]["arm"] != "regular"
    wrong: list[str] = []
    first_sent = {line["version"]: line["sent_digest"] for line in handoffs}
    for line in (*handoffs, *again):
        names = ("version", "received_digest", "resident_digest", "draft_digest")
        found = {name: {report[name] for report in line["reports"]} for name in names}
        checks = {
            "received is not sent": found["received_digest"] == {line["sent_digest"]},
            "served version differs": found["version"] == {line["version"]},
            "replicas differ": len(found["resident_digest"]) == 1,
            "draft changed": found["draft_digest"] == drafts,
            "sent again after a resume and different": line["sent_digest"] == first_sent.get(line["version"]),
        }
        wrong += [f"version {line['version']}: {complaint}" for complaint, holds in checks.items() if not holds]
    different = len({line["sent_digest"] for line in handoffs} - {start["weights_digest"]})
    wanted = min(MIN_HANDOFFS, len(rollout_files(arm_dir)))  # a run of one step has one update to hand over
    detail = "; ".join(wrong[:5]) or "received = sent, replicas equal, draft unchanged"
    one = len(drafts) == 1 and ("" in drafts) != speculative
    return [
        Row("handoffs", len(handoffs), "", "all whole", bool(handoffs) and not wrong, detail),
        at_least("handoffs/new_weights", different, wanted, "", "different weights, the first not counted"),
        Row("draft", len(drafts), "digest", "one and the same", one, f"private bytes {', '.join(drafts) or '(none)'}"),
    ]


def training_rows(arm_dir: Path) -> list[Row]:
    """Gradients are finite, and zero only where no reward told one answer from another; metrics are finite, and
    centering is at work where the config claims it."""
    series = read_metrics(arm_dir)
    taught = {rollout.step: bool(rollout.advantages.any()) for rollout in map(load_rollout, rollout_files(arm_dir))}
    norms = np.array([series["train/grad_norm"][step] for step in taught])
    held = np.isfinite(norms) & ((norms > 0) == np.array(list(taught.values())))
    bad = int(sum(series.get("non_finite", {}).values()))
    detail = f"norms {norms.min():.4g} to {norms.max():.4g}; {sum(taught.values())} steps with differing rewards"
    rows = [
        all_of("gradients", int(held.sum()) if any(taught.values()) else 0, len(norms), detail, "steps"),
        Row("finite_metrics", bad, "non-finite", "0", bad == 0),
    ]
    rang = alarms_in(series)
    about = "; ".join(f"{word} at steps {steps[:8]}" for word, steps in rang.items()) or "none rang"
    rows.append(report("alarms", sum(map(len, rang.values())), "", about))
    gap = float(np.mean(list(series["train/train_rollout_logprob_abs_diff"].values())))
    config = settings_of(arm_dir)
    mismatch = config.rollout.mismatch.model_dump(exclude_defaults=True)
    if mismatch:
        rows.append(report("logprob_gap", gap, "nats", f"mean over the steps; apart by declaration: {mismatch}"))
    else:
        rows.append(at_most("logprob_gap", gap, MAX_LOGPROB_GAP, "nats", "mean over the steps"))
    claimed = config.trainer.estimator.model_dump()
    same = claimed == read_probe(arm_dir).settings
    rows.append(Row("settings", float(same), "", "trainer ran what the config says", same, str(claimed)))
    if claimed["centering"] == "on":
        norm = float(np.mean(list(series["sc/correction_norm"].values())))
        if gap < ON_POLICY_GAP:
            rows.append(report("correction_norm", norm, "", "mean over the steps; on-policy: nothing to correct"))
        elif claimed["mode"] == "none":
            rows.append(at_least("correction_norm", norm, CORRECTION_FLOOR, "", "mean over the steps"))
        else:  # zero by construction while no ratio leaves its bounds: that shows nothing either way
            rows.append(report("correction_norm", norm, "", f"mean over the steps; mode {claimed['mode']}"))
    return rows
