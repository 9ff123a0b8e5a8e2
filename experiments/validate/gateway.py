"""The real sglang-router in front of workers, on loopback, for as long as a context lasts."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import IO

import httpx


@contextmanager
def gateway(workers: Sequence[str], start_timeout_s: float = 60.0) -> Iterator[str]:
    """The router's address. Raises RuntimeError, with the end of its log, where it does not come up.

    Refusals are answers: with its circuit breaker on, the router takes ten of them (HTTP 400) for a broken worker and
    answers 503 from then on, so it runs without one, and without retries, which would repeat a 500.
    """
    if find_spec("sglang_router") is None:
        raise RuntimeError("sglang-router is not installed; pip install sglang-router==0.3.2")
    with tempfile.TemporaryFile("w+") as log:
        process, address = _launch(workers, start_timeout_s, log)
        try:
            yield address
        finally:
            _stop(process)


def _launch(
    workers: Sequence[str], timeout_s: float, log: IO[str], attempts: int = 3
) -> tuple[subprocess.Popen[bytes], str]:
    """A router that answers, and its address. Others may take a free port before the router binds it: then again."""
    port, metrics_port = _free_ports(2)
    command = [
        *(sys.executable, "-m", "sglang_router.launch_router", "--worker-urls", *workers),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--disable-circuit-breaker", "--disable-retries", "--log-level", "warn"),
    ]
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + timeout_s
    log.seek(0)
    log.truncate()
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    while process.poll() is None and time.monotonic() < deadline:
        if _ready(address):
            return process, address
        time.sleep(0.1)
    _stop(process)
    log.seek(0)
    said = log.read()
    if "Address already in use" in said and attempts > 1:
        return _launch(workers, timeout_s, log, attempts - 1)
    raise RuntimeError(f"sglang-router did not come up; the end of its log:\n{said[-2000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _ready(address: str) -> bool:
    try:
        return httpx.get(f"{address}/readiness", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
