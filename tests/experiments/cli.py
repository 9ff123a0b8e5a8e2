"""The command line as a person calls it: a process of its own, and what it left behind."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = [
    "--task.prompts", "4", "--task.samples", "4", "--task.eval_problems", "8", "--rollout.max_concurrency", "16",
    "--rollout.cpus_per_worker", "0.5", "--trainer.cpus_per_worker", "0.5",
]  # fmt: skip


def environment() -> dict[str, str]:
    """No Ray of somebody else."""
    drop = {"RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "WANDB_MODE", "COLUMNS"}
    return {key: value for key, value in os.environ.items() if key not in drop} | {"OMP_NUM_THREADS": "1"}


def call(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "experiments", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=environment() | variables, capture_output=True, text=True, timeout=280, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def manifest(arm_dir: Path) -> dict:
    return json.loads((arm_dir / "manifest.json").read_text())


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Fails where the block leaves a process: orphans of its children become ours."""
    before = descendants()
    yield
    deadline = time.monotonic() + 5
    while (left := descendants() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ") for pid in left]


def descendants() -> set[int]:
    """Live processes below this one."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = entry.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(entry.parent.name)] = int(parent)
    found: set[int] = set()
    while new := {pid for pid, parent in parents.items() if parent in found | {os.getpid()}} - found:
        found |= new
    return found


def listening() -> set[str]:
    """Addresses on which processes below this one listen for TCP; IPv4 as dotted, mapped ones too."""
    inodes: set[str] = set()
    for pid in descendants():
        with contextlib.suppress(OSError):
            inodes |= {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:  # 0A: LISTEN
                word = fields[1].partition(":")[0][-8:]  # the last 32 bits, in the machine's order
                found.add(".".join(str(byte) for byte in reversed(bytes.fromhex(word))))
    return found


ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans of what we start become our children
