"""An environment whose `sglang.launch_server` is this repository's server, so that the process side can be tested
without sglang: real interpreters, processes and sockets, another program behind the same flags."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from rollout.config import RolloutConfig
from tests.rollout.served import ROOT

LAUNCH = """
import sys
from rollout.server.__main__ import main

flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
draft = flags.get("--speculative-draft-model-path")
sys.exit(main([
    "--target", flags["--model-path"], "--port", flags["--port"], "--dtype", flags["--dtype"],
    "--context-length", flags["--context-length"], "--max-concurrency", flags["--max-running-requests"],
    "--threads", "1", *(["--draft", draft, "--arm", "dflash2"] if draft else []),
]))
"""
DIES = """
import sys
print("\\n".join(f"line {i}" for i in range(60)), flush=True)
print("RuntimeError: out of memory", file=sys.stderr)
sys.exit(3)
"""
HANGS = "import time; print('loading', flush=True); time.sleep(300)"
DEAF_CHILD = """
import subprocess, sys, time
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(300)"
subprocess.Popen([sys.executable, "-c", deaf])
time.sleep(300)
"""


def install(folder: Path, launch: str = LAUNCH, *, version: str = "0.5.23", plugin: str = "miles_sc") -> dict[str, str]:
    """Write the packages; the environment in which this interpreter finds them."""
    package = folder / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(launch)
    for name, number in (("sglang", version), ("stand_in_plugin", "1")):
        info = folder / f"{name}-{number}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
        if name != "sglang":
            (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{plugin} = nowhere:register\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "OMP_NUM_THREADS": "1"}


def config(environment: dict[str, str], **sglang: Any) -> RolloutConfig:
    settings = {"python": sys.executable, "environment": environment, "start_timeout_s": 120.0, **sglang}
    return RolloutConfig.model_validate(
        {"engine": "sglang", "context_length": 256, "max_concurrency": 4, "request_timeout_s": 60, "sglang": settings}
    )
