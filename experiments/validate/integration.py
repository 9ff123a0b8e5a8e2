"""Row `integration`: regular and DFlash2, unfiltered and filtered, three steps each through the real loop on Ray, then
audited from what they left on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from experiments.artifacts import arm_dirs
from experiments.audit import audit_rows
from experiments.config import ExperimentConfig, dump
from experiments.evidence import Row, all_of, report
from experiments.validate.models import TRAINED
from experiments.validate.on_sglang.engines import SglangEngines
from experiments.validate.settings import Context

FILTERS = {"sampling.top_k": 8, "sampling.top_p": 0.95}
SHOWN = (
    "pairing", "metadata", "gradients", "handoffs/new_weights", "correction_norm", "logprob_gap", "gradient/centered",
    "gradient/control_uncentered",
)  # fmt: skip
TIMEOUT_S = 540.0


def start(context: Context) -> None:
    """Begin the run in a process of its own; other rows are computed meanwhile, but for those on the same servers."""
    if context.engines.name != "sglang":
        begin(context, {"context_length": 64, "max_concurrency": 32}, {})


def begin(context: Context, rollout: dict[str, Any], own: dict[str, dict[str, Any]]) -> None:
    """rollout: settings of every arm. own: more of each kind of arm."""
    config = ExperimentConfig.model_validate(
        {
            "name": "integration", "steps": 3, "output_dir": context.scratch, "save_support": "all",
            "arms": [
                {
                    "name": f"{kind}-{law}", "kind": kind,
                    "overrides": {**(FILTERS if law == "filtered" else {}), **own.get(kind, {})},
                }
                for kind in ("regular", "dflash2") for law in ("unfiltered", "filtered")
            ],
            "wandb_mode": "disabled", "model": {"target": TRAINED / "target", "draft": TRAINED / "draft"},
            "task": {"prompts": 4, "samples": 4, "eval_problems": 8},
            "trainer": {"advantage": "raw", "advantage_baseline": 0.5},
            "rollout": rollout,
        }
    )  # fmt: skip
    file = context.scratch / "integration.yaml"
    file.write_text(dump(config))
    command = [sys.executable, "-m", "experiments", "run", str(file)]
    with (context.scratch / "integration.log").open("w") as log:
        context.running["integration"] = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )


def attached(engines: SglangEngines) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The loop on the servers that run already, one an arm."""
    config = engines.config.model_dump(mode="json", exclude_defaults=True)
    own = {kind: {"rollout.sglang.urls": [engines.open(kind, "trained").url]} for kind in ("regular", "dflash2")}
    return {**config, "context_length": 64, "max_concurrency": 32}, own


def rows(context: Context) -> list[Row]:
    if isinstance(context.engines, SglangEngines):
        if find_spec("ray") is None:
            return [report("integration", 0, "not shown", "Ray is not installed in this interpreter")]
        begin(context, *attached(context.engines))
    code = context.running.pop("integration").wait(TIMEOUT_S)
    run_dir = context.scratch / "integration"
    if not run_dir.exists():
        log = (context.scratch / "integration.log").read_text()
        return [Row("integration/exit_code", code, "", "0", False, log[-500:])]
    found = audit_rows(run_dir)
    wrong = [f"{row.name}: {row.detail}" for row in found if not row.passed]
    generated = sum(int(row.value) for row in found if row.name.endswith("/metadata"))
    arms = ", ".join(arm.name for arm in arm_dirs(run_dir))
    kept = [replace(row, name=f"integration/{row.name}") for row in found if row.name.endswith(SHOWN)]
    if isinstance(context.engines, SglangEngines):
        context.engines.put_back("trained", ("regular", "dflash2"))
    return [
        Row("integration/exit_code", code, "", "0", code == 0, "; ".join(wrong[:3]) or f"arms {arms}"),
        all_of("integration/audit", len(found) - len(wrong), len(found), f"{generated:,} generated rows", "checks"),
        *kept,
    ]
