"""Ends the Ray of a driver that was killed: `python -m experiments.leash FOLDER` waits for the end of its stdin."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

GRACE_S = 10.0  # Ray's own clean-up comes first


def main(folder: str) -> None:
    """Wait until the driver closes our stdin or is gone; then end what still runs from `folder`, and remove it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdin.buffer.read()
    deadline = time.monotonic() + GRACE_S
    found: set[int] = set()
    while (left := _alive(found := found | family(folder))) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def family(folder: str) -> set[int]:
    """Processes whose command names `folder`, and all below them (Linux; elsewhere Ray's own clean-up has to do)."""
    parents, found = {}, set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if folder.encode() in (entry / "cmdline").read_bytes() and int(entry.name) != os.getpid():
                found.add(int(entry.name))
    while new := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= new
    return found


def _alive(pids: set[int]) -> set[int]:
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.add(pid)
    return found


if __name__ == "__main__":
    main(sys.argv[1])
