"""Starts the real sglang server on a CPU and waits until it answers. One at a time: each wants both cores."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

ROOT = Path(__file__).parents[2]
TINY = ROOT / "experiments" / "models" / "tiny"
HEALTH_TIMEOUT_S = 240


@dataclass
class Server:
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def post(self, path: str, body: dict[str, Any], timeout: float = 120) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=timeout)

    def generate(self, body: dict[str, Any]) -> Any:
        answer = self.post("/generate", body)
        if answer.status_code != 200:
            raise AssertionError(f"{answer.status_code}: {answer.text}\n{self.tail()}")
        return answer.json()

    def ranks(self) -> list[dict[str, Any]]:
        info = requests.get(self.url + "/server_info", timeout=60).json()
        return info["internal_states"][0]["sc"]["ranks"]

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """End the server and every process of its session."""
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(20)


def start(arm: str, folder: Path, *flags: str, **environment: str) -> Server:
    """arm: regular, dflash or dflash2. Raises AssertionError with the last log lines where the server dies or hangs."""
    port, log = _free_port(), folder / f"{arm}.log"
    command = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", str(TINY / "target"), "--port", str(port),
        "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
        "--dtype", "bfloat16", "--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled",
        "--disable-radix-cache", "--max-total-tokens", "4096", "--max-running-requests", "8",
        "--context-length", "512", "--log-level", "info", "--skip-server-warmup", *flags,
    ]  # fmt: skip
    if arm != "regular":
        command += [
            "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft(arm, folder)),
            "--speculative-draft-attention-backend", "torch_native",
        ]  # fmt: skip
    paths = [str(ROOT / "tests" / "sglang_cpu" / "site"), str(ROOT)]
    switches = {
        "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1", "SGLANG_PLATFORM": "cpu_test",
        # sglang's own test switch: now and then one of several running requests is put back and prefilled again.
        "SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "31", **environment,
    }  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, **switches}
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        _wait(server)
    except BaseException:
        server.stop()
        raise
    return server


def draft(arm: str, folder: Path) -> Path:
    """The tiny draft as it ships (DFlash2), or without its selector (DFlash)."""
    if arm == "dflash2":
        return TINY / "draft"
    plain = folder / "draft"
    if not plain.exists():
        shutil.copytree(TINY / "draft", plain)
        config = json.loads((plain / "config.json").read_text())
        config["architectures"] = ["DFlashDraftModel"]
        for name in ("selector_rank", "selector_top_k"):
            del config["dflash_config"][name]
        (plain / "config.json").write_text(json.dumps(config))
    return plain


def _wait(server: Server) -> None:
    deadline = time.monotonic() + HEALTH_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise AssertionError(f"the server died with {server.process.returncode}:\n{server.tail(60)}")
        try:
            if requests.get(server.url + "/health", timeout=30).status_code == 200:
                return
        except requests.RequestException:
            pass
        time.sleep(1)
    raise AssertionError(f"no health within {HEALTH_TIMEOUT_S} s:\n{server.tail(60)}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
