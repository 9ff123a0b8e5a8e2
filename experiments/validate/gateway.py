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

import httpx


@contextmanager
def gateway(workers: Sequence[str], start_timeout_s: float = 60.0) -> Iterator[str]:
    """The router's address. Raises RuntimeError, with the end of its log, where it does not come up.

    Refusals are answers: with its circuit breaker on, the router takes ten of them (HTTP 400) for a broken worker and
    answers 503 from then on, so it runs without one, and without retries, which would repeat a 500.
    """
    if find_spec("sglang_router") is None:
        raise RuntimeError("sglang-router is not installed; pip install sglang-router==0.3.2")
    port, metrics_port = _free_ports(2)
    command = [
        *(sys.executable, "-m", "sglang_router.launch_router", "--worker-urls", *workers),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--disable-circuit-breaker", "--disable-retries", "--log-level", "warn"),
    ]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            address = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + start_timeout_s
            while not _ready(address):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(f"sglang-router did not come up; the end of its log:\n{log.read()[-2000:]}")
                time.sleep(0.1)
            yield address
        finally:
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
