"""The command line as a person calls it: a process of its own, and what it left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = [
    "--task.prompts", "4", "--task.samples", "4", "--task.eval_problems", "8", "--rollout.max_concurrency", "16",
    "--rollout.cpus_per_worker", "0.5", "--trainer.cpus_per_worker", "0.5",
]  # fmt: skip
MARK = "MILES_EXT_TEST_MARK"


def environment(mark: str = "") -> dict[str, str]:
    """No Ray of somebody else, and a mark that every child inherits."""
    drop = {"RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "WANDB_MODE", "COLUMNS"}
    return {k: v for k, v in os.environ.items() if k not in drop} | {MARK: mark, "OMP_NUM_THREADS": "1"}


def call(*arguments: str | Path, mark: str = "", timeout: float = 280) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "experiments", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=environment(mark), capture_output=True, text=True, timeout=timeout, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def alive(mark: str) -> list[str]:
    """Command lines of processes that carry the mark: what a call left behind."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def manifest(arm_dir: Path) -> dict:
    return json.loads((arm_dir / "manifest.json").read_text())


def listening(mark: str) -> list[str]:
    """Addresses on which processes with the mark listen for TCP; IPv4 as dotted, mapped ones too."""
    inodes = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                inodes |= {os.readlink(link) for link in (entry / "fd").iterdir()}
        except OSError:
            continue
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:  # 0A: LISTEN
                word = fields[1].partition(":")[0][-8:]  # the last 32 bits, in the machine's order
                found.append(".".join(str(byte) for byte in reversed(bytes.fromhex(word))))
    return found
