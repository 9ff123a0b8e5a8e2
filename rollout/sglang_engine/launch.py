"""What a server is started with: its command, its environment, and the checks that can fail before it is started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from miles_ext.capability import ArmKind
from miles_ext.errors import CapabilityError
from miles_ext.sglang_plugin import SGLANG_VERSION
from miles_ext.sglang_plugin.settings import ENGINE_ID_VARIABLE, ORDER_VARIABLE, STRICT_VARIABLE
from rollout.config import RolloutConfig

PLUGIN = "miles_sc"
HOST = "127.0.0.1"
PROBE = """
from importlib.metadata import PackageNotFoundError, entry_points, version
try:
    print(version("sglang"), *(point.name for point in entry_points(group="sglang.srt.plugins")))
except PackageNotFoundError:
    print("none")
"""


def command(config: RolloutConfig, arm: ArmKind, target: Path, draft: Path | None, port: int) -> list[str]:
    """The server's command line. draft: as `drafts.draft_for` gives it, or None for regular decoding."""
    mine = config.sglang
    flags = {
        "--model-path": target, "--host": HOST, "--port": port, "--weight-version": 0, "--dtype": config.dtype,
        "--context-length": config.context_length, "--max-running-requests": config.max_concurrency,
        "--sampling-mask-max-tokens": mine.max_support, "--tp-size": mine.tp_size,
    }  # fmt: skip
    if config.device != "auto":
        flags["--device"] = config.device
    if mine.mem_fraction is not None:
        flags["--mem-fraction-static"] = mine.mem_fraction
    if draft is not None:
        flags |= {
            "--speculative-algorithm": "DFLASH", "--speculative-draft-model-path": draft,
            "--speculative-accept-threshold-single": 1.0, "--speculative-accept-threshold-acc": 1.0,
        }  # fmt: skip
    line = [str(mine.python.absolute()), "-m", "sglang.launch_server"]
    line += [str(part) for flag in flags.items() for part in flag]
    return [*line, *(["--enable-deterministic-inference"] if mine.deterministic else []), *mine.args]


def environment(config: RolloutConfig, engine_id: str) -> dict[str, str]:
    """This process's environment, without what belongs to its interpreter where the server has another, and the
    plugin's settings."""
    same = config.sglang.python.absolute() == Path(sys.executable).absolute()
    own = () if same else ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    inherited = {name: value for name, value in os.environ.items() if name not in own}
    plugin = {ORDER_VARIABLE: config.sglang.filter_order, STRICT_VARIABLE: "1", ENGINE_ID_VARIABLE: engine_id}
    return {**inherited, **config.sglang.environment, **plugin}


def require_interpreter(python: Path, variables: dict[str, str]) -> None:
    """Raise CapabilityError unless `python` runs, and has sglang in the plugin's version, and the plugin."""
    where = f"rollout.sglang.python is {python}"
    try:
        answer = subprocess.run(
            [str(python.absolute()), "-c", PROBE], env=variables, capture_output=True, text=True, timeout=60
        )
    except OSError as error:
        raise CapabilityError(f"{where}, which does not run: {error.strerror}; name a Python interpreter") from error
    if answer.returncode:
        last = answer.stderr.strip().splitlines()[-1:]
        raise CapabilityError(f"{where}, which is no working Python: {' '.join(last)}; name a Python interpreter")
    version, *plugins = answer.stdout.split()
    if version != SGLANG_VERSION:
        found = "no sglang" if version == "none" else f"sglang {version}"
        raise CapabilityError(
            f"{where}, where there is {found}; accepted: {SGLANG_VERSION}, as requirements/ installs it"
        )
    if PLUGIN not in plugins:
        raise CapabilityError(
            f"{where}, where sglang finds the plugins {plugins} and not {PLUGIN}: nothing it samples could be proved; "
            f"install this repository there: {python} -m pip install --no-deps -e ."
        )


def reserve_port(ports: tuple[int, int] | None) -> socket.socket:
    """A socket that keeps a port from everybody but a server, which may still listen there; close it afterwards.

    A server binds a minute after its port was chosen: on a busy machine a port that was merely free is gone by then.
    Raises ValueError where the whole range is taken.
    """
    for port in (0,) if ports is None else range(ports[0], ports[1] + 1):
        reserved = socket.socket()
        try:
            reserved.bind((HOST, port))  # in earnest: without SO_REUSEADDR it fails beside any other socket
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # but lets a server in, which sets it too
            return reserved
        except OSError:
            reserved.close()
    raise ValueError(f"every port of rollout.sglang.ports = {ports} on {HOST} is taken; widen the range")
