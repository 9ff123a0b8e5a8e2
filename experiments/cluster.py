"""Ray on this machine alone: everything on loopback, and nothing left behind however the block ends."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

    from experiments.config import ExperimentConfig

DASHBOARD_PORT = 8265
ANSWER_TIMEOUT_S = 5.0
START_TIMEOUT_S = 180.0  # a busy machine takes its time
STOP_TIMEOUT_S = 15.0
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on every system: the node is 127.0.0.1 and listens nowhere else
}
_CHATTY = (
    "ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging",
    "ray._private.runtime_env.working_dir",
)  # fmt: skip
_MARK = "MILES_EXT_RAY_HEAD"  # every process of a head inherits it: how stragglers are told from other people's Ray


def connect(url: str) -> JobSubmissionClient:
    """A client of the Ray Jobs API at `url`. ValueError where no Ray answers there soon, or it refuses us."""
    try:
        _probe(url)
        from ray.job_submission import JobSubmissionClient  # reads RAY_AUTH_MODE when it is imported

        for name in _CHATTY:
            logging.getLogger(name).setLevel(logging.WARNING)
        return JobSubmissionClient(url)
    except Exception as error:  # noqa: BLE001  requests', Ray's and JSON's own errors all mean the same here
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"no Ray Jobs API at {url} ({reason}); accepted: the dashboard of a running cluster, such as "
            f"http://127.0.0.1:{DASHBOARD_PORT}; check the address, or leave --address out to start Ray here"
        ) from error


def _probe(url: str) -> None:
    """OSError where nothing answers: Ray's client would wait for ever. Turns token authentication on where asked."""
    try:
        urllib.request.urlopen(f"{url}/api/version", timeout=ANSWER_TIMEOUT_S).close()
    except urllib.error.HTTPError as refusal:
        if refusal.code == 401:
            os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray then finds the token where it keeps it


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def choose_port(asked: int | None) -> int:
    """The port asked for, else Ray's usual one, else any free one. ValueError where the one asked for is busy."""
    if asked is not None and not port_is_free(asked):
        raise ValueError(
            f"port {asked} on 127.0.0.1 is busy and no Ray dashboard answers there; pass another --port, or none to "
            "have a free one chosen"
        )
    if asked is not None or port_is_free(DASHBOARD_PORT):
        return asked or DASHBOARD_PORT
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def local_head(cpus: float, port: int) -> Iterator[JobSubmissionClient]:
    """A Ray head with its dashboard on 127.0.0.1:port while the block runs; yields a client of its Jobs API.

    cpus: logical CPUs that it must offer at least. Raises RuntimeError with Ray's own words where it does not start.
    """
    # Sockets lie under this folder and their paths are limited to about 100 bytes: short, whatever TMPDIR says.
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    log = folder / "start.log"
    os.environ.update(_private())
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--temp-dir={folder}",
        "--port=0", "--dashboard-host=127.0.0.1", f"--dashboard-port={port}", "--dashboard-agent-listen-port=0",
        f"--num-cpus={_offered(cpus)}", "--disable-usage-stats",
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=os.environ | {_MARK: str(folder)}, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_die_with_parent,
        )  # fmt: skip
    try:
        yield _wait_until_up(process, f"http://127.0.0.1:{port}", log)
    finally:
        _stop(process, str(folder))
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path) -> JobSubmissionClient:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            return connect(url)
        except ValueError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Ray did not start: {_last_words(log)}") from error
        time.sleep(0.2)


def _stop(process: subprocess.Popen[bytes], mark: str) -> None:
    """End the head and wait until every process that it started is gone."""
    process.terminate()
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while (process.poll() is None or _family(process.pid, mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for straggler in _family(process.pid, mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(straggler, signal.SIGKILL)
    process.kill()
    process.wait()


def _family(head: int, mark: str) -> list[int]:
    """Process ids that the head started, directly or not (Linux; elsewhere Ray's own clean-up has to do).

    Ray's workers overwrite their environment with their title but stay in the head's session; the processes of a job
    leave the session but keep their environment.
    """
    wanted, found = f"{_MARK}={mark}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            ours = int(session) == head or wanted in (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # gone meanwhile, or another user's
            continue
        if ours and state != "Z":
            found.append(int(entry.name))
    return found


def _die_with_parent() -> None:
    """Ask Linux to send SIGTERM when the parent dies, by kill -9 too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-4:]) or f"it said nothing within {START_TIMEOUT_S:.0f} s"


def stay_on_loopback() -> None:
    """Make a Ray that this process starts listen on 127.0.0.1 alone. Ray reads it once, when it is imported."""
    if "RAY_ADDRESS" not in os.environ:
        os.environ.update(_private())


def _private() -> dict[str, str]:
    """Variables of a Ray of our own: on loopback, and with a token, so that no other user runs code through it."""
    return ENVIRONMENT | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@contextlib.contextmanager
def session(cpus: float) -> Iterator[None]:
    """Ray for this process: the cluster that RAY_ADDRESS names (Ray sets it in a job), else one of its own.

    Raises ValueError where that address does not answer. `stay_on_loopback` comes first, before Ray is imported.
    """
    import ray

    address, on_terminate = os.environ.get("RAY_ADDRESS"), signal.getsignal(signal.SIGTERM)
    leash = None
    quiet = {"logging_level": logging.ERROR, "runtime_env": {"env_vars": {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}}}
    if address:
        _require_answer(address)
        ray.init(**quiet)
    else:
        folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        own = {"num_cpus": _offered(cpus), "include_dashboard": False, "_temp_dir": folder}
        leash = _leash(folder)
        ray.init(address="local", **own, **quiet)
    try:
        signal.signal(signal.SIGTERM, on_terminate)  # Ray puts its own in place, which aborts
        yield
    finally:
        ray.shutdown()
        if leash is not None:
            leash.communicate()


def _leash(folder: str) -> subprocess.Popen[bytes]:
    """Removes `folder`, and every process of the Ray in it, when its stdin ends: with us, by kill -9 too."""
    command = [sys.executable, "-m", "experiments.leash", folder]
    here = Path(__file__).parents[1]
    return subprocess.Popen(command, cwd=here, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)


def _require_answer(address: str) -> None:
    """ValueError where nothing listens at RAY_ADDRESS: Ray would try again for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:  # `auto`: Ray looks for a head of this machine itself
        return
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no Ray cluster at RAY_ADDRESS={address} ({error}); accepted: HOST:PORT of a running head; correct or "
            "unset it"
        ) from error


def require_room(config: ExperimentConfig) -> None:
    """Raise ValueError where the cluster is too small for one arm, or no node holds one worker: Ray would wait."""
    import ray

    has = ray.cluster_resources()
    sides = (config.rollout, config.trainer)
    for resource, wanted in (
        ("CPU", sum(side.workers * side.cpus_per_worker for side in sides)),
        ("GPU", sum(side.workers * side.gpus_per_worker for side in sides)),
    ):
        if wanted > has.get(resource, 0):
            raise ValueError(
                f"an arm needs {wanted:g} {resource} and the cluster has {has.get(resource, 0):g}; add nodes, or lower "
                f"rollout.workers, trainer.workers or their {resource.lower()}s_per_worker"
            )
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for name, side in (("rollout", config.rollout), ("trainer", config.trainer)):
        worker = {"CPU": side.cpus_per_worker, "GPU": side.gpus_per_worker}
        if not any(all(node.get(key, 0) >= amount for key, amount in worker.items()) for node in nodes):
            raise ValueError(
                f"a {name} worker needs {worker['CPU']:g} CPU and {worker['GPU']:g} GPU on one node, and none of the "
                f"{len(nodes)} nodes has as much; lower {name}.cpus_per_worker or {name}.gpus_per_worker"
            )


def _offered(cpus: float) -> int:
    """Logical CPUs of a Ray of our own: those there are, or those asked for where they are more."""
    return max(os.cpu_count() or 1, math.ceil(cpus))
