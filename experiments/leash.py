"""Ends the Ray of a driver that was killed: `python -m experiments.leash FOLDER` waits for the end of its stdin."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

LOOK_S = 2.0  # Ray's agents are orphans without a trace once its raylet is gone: they are looked for while it lives
GRACE_S = 5.0  # Ray's own clean-up comes first
Process = tuple[int, str]  # id, and the time of its start: ids are used again


def main(folder: str) -> None:
    """Wait until the driver closes our stdin or is gone; then end what is left of the Ray in `folder` and remove it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    found: set[Process] = set()
    while not select.select([sys.stdin], [], [], LOOK_S)[0]:
        found = {process for process in found if _alive(process)} | family(folder)
    deadline = time.monotonic() + GRACE_S
    while (left := {process for process in found | family(folder) if _alive(process)}) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid, _ in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def family(folder: str) -> set[Process]:
    """Processes whose command names `folder`, and all below them (Linux; elsewhere Ray's own clean-up has to do)."""
    parents: dict[int, int] = {}
    started: dict[int, str] = {}
    found: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields, pid = _stat(int(entry.name)), int(entry.name)
            parents[pid], started[pid] = int(fields[1]), fields[19]
            if folder.encode() in (entry / "cmdline").read_bytes() and pid != os.getpid():
                found.add(pid)
    while new := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= new
    return {(pid, started[pid]) for pid in found}


def _alive(process: Process) -> bool:
    try:
        fields = _stat(process[0])
    except OSError:
        return False
    return fields[0] != "Z" and fields[19] == process[1]


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on: 0 state, 1 parent, 19 start."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


if __name__ == "__main__":
    main(sys.argv[1])
