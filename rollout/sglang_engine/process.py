"""Owns one server process: starts it, waits until it decodes, says how it died, ends it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from miles_ext.errors import EngineError
from rollout.sglang_engine import leash

LAST_LINES = 40


class ServerProcess:
    """A command on a leash (see leash.py), with its output in `folder`/server.log. It ends with this process."""

    def __init__(self, command: list[str], environment: dict[str, str], folder: Path) -> None:
        self.log = folder / "server.log"
        with self.log.open("wb") as out:
            self._leash = subprocess.Popen(
                [sys.executable, leash.__file__, str(folder), *command],
                stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,  # an interrupt from the keyboard reaches it through its owner
            )  # fmt: skip

    @property
    def running(self) -> bool:
        return self._leash.poll() is None

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Raise EngineError, with the last lines of the log, where the server dies or is not ready in time."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if not self.running:
                code = self._leash.returncode
                raise EngineError(f"the sglang server died while it started (exit {code}){self._end()}")
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the sglang server did not decode a token within rollout.sglang.start_timeout_s = {timeout_s} s"
                    + self._end()
                )
            time.sleep(0.25)

    def tail(self) -> str:
        """The last lines of the log."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-LAST_LINES:])

    def stop(self) -> None:
        """End the server and all of its processes; harmless when called again."""
        if self._leash.stdin is not None and not self._leash.stdin.closed:
            self._leash.stdin.close()
        self._leash.wait()

    def _end(self) -> str:
        return f"; the end of its log:\n{self.tail()}"
