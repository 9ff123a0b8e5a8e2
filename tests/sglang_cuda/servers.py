"""Starts the servers that `show` asks, and leaves them running until they are stopped.

    python -m tests.sglang_cuda.servers start FOLDER [NAME ...]
    python -m tests.sglang_cuda.servers stop FOLDER

FOLDER/SIZE/target and FOLDER/SIZE/draft, where they exist (links will do), are served in the place of random models.

They start together: with a capped token pool none sizes its memory by what is free at that moment. The interpreter
must have sglang's CUDA build, and the plugin under its entry point (with_plugin.sh).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import requests

from tests.sglang_cpu.server import ROOT, TINY, Server, draft
from tests.sglang_cuda import models

HEALTH_TIMEOUT_S = 420
FLAGS = [
    "--attention-backend", "triton", "--mem-fraction-static", "0.4", "--cuda-graph-backend-prefill=disabled",
    "--dtype", "bfloat16", "--max-total-tokens", "65536", "--max-running-requests", "128", "--context-length", "512",
    "--log-level", "info", "--skip-server-warmup",
]  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """arm: regular, dflash or dflash2. model: tiny, or a size of `models`."""

    arm: str
    model: str = "tiny"
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


SAVER = ("--enable-memory-saver", "--enable-weights-cpu-backup", "--enable-draft-weights-cpu-backup")
# with_plugin.sh names the plugins that every server loads.
PLUGINS = os.environ.get("SGLANG_PLUGINS", "miles_sc")
WITHOUT_VERIFIER = {"SGLANG_PLUGINS": f"{PLUGINS},no_verifier"}
STOCK = {"SGLANG_PLUGINS": PLUGINS.replace("miles_sc", "none")}
KINDS = {
    "regular": Kind("regular"),
    "dflash": Kind("dflash"),
    "dflash2": Kind("dflash2"),
    "no_verifier": Kind("dflash", environment=WITHOUT_VERIFIER),
    "memory_saver": Kind("dflash", flags=SAVER),
    "stock_135m": Kind("regular", "135m", environment=STOCK),
    "regular_135m": Kind("regular", "135m"),
    "dflash_135m": Kind("dflash", "135m"),
    "regular_wide": Kind("regular", "wide"),
}


def launch(name: str, folder: Path, port: int) -> Server:
    """A server on its way, in a process session of its own."""
    kind = KINDS[name]
    if kind.model == "tiny":
        target, drafted = TINY / "target", draft(kind.arm, folder) if kind.arm != "regular" else None
    else:
        target, drafted = folder / kind.model / "target", folder / kind.model / "draft"
    command = [
        sys.executable, "-W", "ignore", "-m", "sglang.launch_server", "--model-path", str(target), "--host",
        "127.0.0.1", "--port", str(port), "--random-seed", str(port), *FLAGS, *kind.flags,
    ]  # fmt: skip
    if kind.arm != "regular":
        command += [
            "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(drafted),
            "--speculative-draft-attention-backend", "triton",
        ]  # fmt: skip
    environment = {**os.environ, **kind.environment}
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=environment, cwd=ROOT
        )
    return Server(f"http://127.0.0.1:{port}", process, log)


def start(folder: Path, names: list[str]) -> dict[str, dict[str, str | int]]:
    """Launch, wait until each is healthy or dead, note those that live in `servers.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    for size in {KINDS[name].model for name in names} - {"tiny"}:
        models.write(folder / size, size)
    first = time.monotonic()
    waiting = {name: launch(name, folder, 21_000 + 2_000 * list(KINDS).index(name)) for name in names}
    alive = attach(folder)
    while waiting and time.monotonic() - first < HEALTH_TIMEOUT_S:
        time.sleep(1)
        for name, server in list(waiting.items()):
            if server.process.poll() is not None:
                print(f"{name} died with {server.process.returncode}:\n{server.tail(25)}", flush=True)
                del waiting[name]
            elif healthy(server.url):
                seconds = round(time.monotonic() - first)
                print(f"{name} healthy after {seconds} s", flush=True)
                alive[name] = {"url": server.url, "pid": server.process.pid, "seconds": seconds}
                del waiting[name]
    for name, server in waiting.items():
        print(f"{name} is not healthy:\n{server.tail(25)}", flush=True)
        server.stop()
    (folder / "servers.json").write_text(json.dumps(alive))
    return alive


def attach(folder: Path) -> dict[str, dict[str, str | int]]:
    """What `start` noted: name -> url, pid, seconds until healthy."""
    noted = folder / "servers.json"
    return json.loads(noted.read_text()) if noted.exists() else {}


def stop(folder: Path, names: list[str]) -> None:
    alive = attach(folder)
    for name in [name for name in alive if name in names]:
        os.killpg(int(alive.pop(name)["pid"]), signal.SIGKILL)
    (folder / "servers.json").write_text(json.dumps(alive))


def healthy(url: str) -> bool:
    try:
        return requests.get(url + "/health", timeout=2).status_code == 200
    except requests.RequestException:
        return False


if __name__ == "__main__":
    action, where, *chosen = sys.argv[1:]
    {"start": start, "stop": stop}[action](Path(where), chosen or list(KINDS))
