"""Settings of an engine whose server runs on the CPU platform of this folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from rollout.config import RolloutConfig
from tests.sglang_cpu.server import ROOT

ARGS = (
    "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--cuda-graph-backend-decode=disabled",
    "--cuda-graph-backend-prefill=disabled", "--disable-radix-cache", "--max-total-tokens", "4096",
    "--log-level", "info", "--skip-server-warmup",
)  # fmt: skip
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "sglang_cpu" / "site"), str(ROOT)]),
    "SGLANG_PLATFORM": "cpu_test", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


def cpu_config(arm: str, **sglang: Any) -> RolloutConfig:
    """sglang: fields of SglangConfig that differ."""
    drafting = () if arm == "regular" else ("--speculative-draft-attention-backend", "torch_native")
    settings = {"python": Path(sys.executable), "args": (*ARGS, *drafting), "environment": ENVIRONMENT}
    return RolloutConfig.model_validate(
        {
            "engine": "sglang", "device": "cpu", "dtype": "bfloat16", "max_concurrency": 8, "context_length": 512,
            "sglang": settings | sglang,
        }
    )  # fmt: skip
