"""An experiment as a Ray job, followed to its end (`ray job submit -- python -m experiments run ...` by hand)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from experiments import cluster
from experiments.config import load
from experiments.progress import Follower

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

# Ray leaves out .git, .venv and what .gitignore names; these only cost upload time.
EXCLUDES = [".git", ".venv", "runs", "wandb", "__pycache__", ".pytest_cache", ".ruff_cache", "docs", "tests"]
STOP_TIMEOUT_S = 20.0


def submit(
    file: Path, overrides: Sequence[tuple[str, str]], *, address: str | None, port: int | None, console: Console,
    resume: str = "never",
) -> int:  # fmt: skip
    """Run the experiment of `file` as a job on the cluster at `address`, or on a Ray that lives as long as this call.

    Results land in the output directory of this machine's file system. Returns the job's own exit code.
    """
    config = load(file, overrides)
    if not file.resolve().is_relative_to(Path.cwd()):
        raise ValueError(
            f"{file} is outside {Path.cwd()}, which travels with the job; accepted: a settings file below it; copy it "
            "here"
        )
    config.model.require_files(config.arms)
    output_dir = config.output_dir.resolve()
    arguments = [*(part for key, value in overrides for part in (f"--{key}", value)), "--output_dir", str(output_dir)]
    arguments += ["--resume", resume if resume in ("auto", "never") else str(Path(resume).resolve())]
    with _cluster(address, port, config.cpus, console) as (client, python):
        entrypoint = shlex.join([python, "-m", "experiments", "run", os.path.relpath(file), *arguments])
        job = client.submit_job(
            entrypoint=entrypoint,
            runtime_env={
                "working_dir": ".", "excludes": EXCLUDES, "env_vars": {"PYTHONUNBUFFERED": "1"},
            },
            metadata={"experiment": config.name},
        )  # fmt: skip
        console.print(f"submitted as {job}", highlight=False)
        with _stopped_when_left(client, job), Follower(console) as follower:
            asyncio.run(_follow(client, job, follower))
        return _exit_code(client, job)


@contextlib.contextmanager
def _cluster(
    address: str | None, port: int | None, cpus: float, console: Console
) -> Iterator[tuple[JobSubmissionClient, str]]:
    """A client, and the interpreter to run with: ours on a Ray that we start, the cluster's own elsewhere."""
    address = address or os.environ.get("RAY_API_SERVER_ADDRESS")
    if address:
        yield cluster.connect(address), "python"
        return
    client = _running_here(port or cluster.DASHBOARD_PORT, console)
    if client is not None:
        yield client, sys.executable
        return
    chosen = cluster.choose_port(port)
    console.print(f"starting Ray here, its dashboard at http://127.0.0.1:{chosen} while it runs", highlight=False)
    with cluster.local_head(cpus, chosen) as client:
        yield client, sys.executable


def _running_here(port: int, console: Console) -> JobSubmissionClient | None:
    if cluster.port_is_free(port):
        return None
    try:
        client = cluster.connect(f"http://127.0.0.1:{port}")
    except ValueError:  # another program, or a Ray that is not ours to use
        return None
    console.print(f"using the Ray that runs at http://127.0.0.1:{port}", highlight=False)
    return client


async def _follow(client: JobSubmissionClient, job: str, follower: Follower) -> None:
    rest = ""
    async for chunk in client.tail_job_logs(job):
        *lines, rest = (rest + chunk).split("\n")
        for line in lines:
            follower.line(line)
    if rest:
        follower.line(rest)


@contextlib.contextmanager
def _stopped_when_left(client: JobSubmissionClient, job: str) -> Iterator[None]:
    """Wait until the job has ended; stop it where the block is left by an exception."""
    try:
        yield
    except BaseException:
        client.stop_job(job)
        raise
    finally:
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while not client.get_job_status(job).is_terminal() and time.monotonic() < deadline:
            time.sleep(0.2)


def _exit_code(client: JobSubmissionClient, job: str) -> int:
    info = client.get_job_info(job)
    if info.driver_exit_code is not None:
        return info.driver_exit_code
    return 0 if info.status == "SUCCEEDED" else 1
