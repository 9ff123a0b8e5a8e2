"""Row `integration`: regular and DFlash2, unfiltered and filtered, three steps each through the real loop on Ray, then
audited from what they left on disk."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from experiments.audit import audit_rows
from experiments.config import ExperimentConfig
from experiments.evidence import Row, all_of
from experiments.validate.models import TRAINED
from experiments.validate.settings import Context

SHOWN = (
    "pairing", "metadata", "gradients", "handoffs/new_weights", "correction_norm", "gradient/centered",
    "gradient/control_uncentered",
)  # fmt: skip
FILTERS = {"sampling.top_k": 8, "sampling.top_p": 0.95}


def rows(context: Context) -> list[Row]:
    from experiments.arms import run

    config = ExperimentConfig.model_validate(
        {
            "name": "integration", "steps": 3, "output_dir": context.scratch, "save_support": "all",
            "arms": [
                {"name": f"{kind}-{law}", "kind": kind, "overrides": FILTERS if law == "filtered" else {}}
                for kind in ("regular", "dflash2") for law in ("unfiltered", "filtered")
            ],
            "wandb_mode": "disabled", "model": {"target": TRAINED / "target", "draft": TRAINED / "draft"},
            "task": {"prompts": 4, "samples": 4, "eval_problems": 8},
            "rollout": {"context_length": 64, "max_concurrency": 32},
        }
    )  # fmt: skip
    code = run(config, Console(stderr=True, quiet=True))
    found = audit_rows(config.run_dir)
    wrong = [f"{row.name}: {row.detail}" for row in found if not row.passed]
    generated = sum(int(row.value) for row in found if row.name.endswith("/metadata"))
    head = all_of("integration/audit", len(found) - len(wrong), len(found), f"{generated:,} generated rows", "checks")
    ended = Row("integration/exit_code", code, "", "0", code == 0, "; ".join(wrong[:3]))
    kept = [replace(row, name=f"integration/{row.name}") for row in found if row.name.endswith(SHOWN)]
    return [head, ended, *kept]
