"""Runs a command that must not outlive its owner: `python leash.py FOLDER COMMAND ...`, a pipe on standard input.

The command leads a process group of its own. The group ends when the pipe closes, which is what happens however the
owner ends, and when the command itself ends. An owner that is gone cannot remove FOLDER: that is done here too.
Standard library only, and run as a file: nothing of this repository need be importable.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time

GRACE_S = 10.0
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def main(folder: str, command: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the command come here, where they are reaped
    mine = os.getpid()
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=lambda: _die_with(mine)
    )  # fmt: skip
    abandoned = False
    try:
        while child.poll() is None and not abandoned:
            readable, _, _ = select.select([sys.stdin], [], [], 0.2)
            abandoned = bool(readable) and not os.read(sys.stdin.fileno(), 1)
    finally:
        end_group(child)
        if abandoned:
            shutil.rmtree(folder, ignore_errors=True)
    return child.returncode


def end_group(child: subprocess.Popen[bytes]) -> None:
    """End every process of the group, those included that outlived the child."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, sent)
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            if child.poll() is not None:
                _reap()
            try:
                os.killpg(child.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _die_with(parent: int) -> None:
    """Should the parent itself be killed: from now on, or before this ran."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
