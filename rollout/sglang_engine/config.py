"""Settings of sglang servers: every field is `--rollout.sglang.NAME` on the command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from miles_ext.sampling import FilterOrder

OWNED_FLAGS = frozenset(
    {
        "--model-path", "--host", "--port", "--dtype", "--context-length", "--max-running-requests", "--weight-version",
        "--sampling-mask-max-tokens", "--speculative-algorithm", "--speculative-draft-model-path",
        "--speculative-accept-threshold-single", "--speculative-accept-threshold-acc", "--tp-size", "--tp",
        "--tensor-parallel-size", "--mem-fraction-static", "--enable-deterministic-inference", "--model",
    }
)  # fmt: skip
"""Flags that the engine sets from other settings, or that must stay as they are for the recorded law to be exact."""


SECRET_FLAGS = frozenset({"--api-key", "--admin-api-key", "--ssl-keyfile-password"})
"""On a command line every user of the machine reads them."""
SECRET = re.compile(r"(?i)(^|_)(api_?key|key|token|secret|password|passwd|credentials?)(_|$)")


def _free_flags(args: tuple[str, ...]) -> tuple[str, ...]:
    taken = sorted({arg.partition("=")[0] for arg in args} & OWNED_FLAGS)
    if taken:
        raise ValueError(f"{', '.join(taken)} set by the engine itself; accepted: other flags of sglang.launch_server")
    secret = sorted({arg.partition("=")[0] for arg in args} & SECRET_FLAGS)
    if secret:
        raise ValueError(f"{', '.join(secret)} would show in the process list; accepted: flags without secrets")
    return args


def _no_secrets(environment: dict[str, str]) -> dict[str, str]:
    named = sorted(name for name in environment if SECRET.search(name))
    if named:
        raise ValueError(
            f"{', '.join(named)} look like secrets, and settings are written to disk and to W&B; accepted: other "
            "variables; set these where Ray is started: servers inherit them"
        )
    return environment


def _range(ports: tuple[int, int] | None) -> tuple[int, int] | None:
    if ports is not None and not 1 <= ports[0] <= ports[1] <= 65535:
        raise ValueError("accepted: first and last port, 1 <= first <= last <= 65535, or null")
    return ports


class SglangConfig(BaseModel):
    """Used where `rollout.engine` is `sglang`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    python: Path = Path(".venv-sglang/bin/python")
    """Interpreter of the environment that holds sglang and this package as its plugin."""
    urls: tuple[str, ...] = ()
    """Servers to attach to, one a worker, instead of starting them; they must run the plugin."""
    api_key_file: Path | None = None
    """File with the API key of those servers; null takes MILES_EXT_API_KEY where a worker's environment has it."""
    router: str = ""
    """A sglang-router in front of all workers: responses are asked of it, all else of each server itself. Start it with
    --disable-circuit-breaker --disable-retries: it takes refusals for a broken server."""
    args: Annotated[tuple[str, ...], AfterValidator(_free_flags)] = ()
    """More flags of sglang.launch_server."""
    environment: Annotated[dict[str, str], AfterValidator(_no_secrets)] = {}
    """More environment variables of the server. Secrets belong into the environment of Ray's workers, which servers
    inherit: settings are written to disk and to W&B."""
    ports: Annotated[tuple[int, int] | None, AfterValidator(_range)] = None
    """First and last port that a server may take; null lets the system choose."""
    tp_size: int = Field(default=1, ge=1)
    """GPUs that share one model."""
    mem_fraction: float | None = Field(default=None, gt=0, lt=1)
    """Part of a GPU's memory for weights and caches; null leaves it to sglang."""
    max_support: int = Field(default=4096, ge=1)
    """Entries of a recorded law at most; sampling.max_support and sampling.head_size must not exceed it."""
    filter_order: FilterOrder = "top_k_first"
    """One server samples in one order: the same as sampling.filter_order."""
    deterministic: bool = False
    """Regular decoding repeats for a seed whatever the batch, on attention backends that sglang lists for it."""
    transport: Literal["disk", "tensor"] = "disk"
    """Weights go through `folder`, which the server must see too, or by value over HTTP."""
    folder: Path | None = None
    """Where logs and handed-over weights are kept while a server runs; null makes a temporary folder."""
    start_timeout_s: float = Field(default=1200.0, gt=0)
    """From the start of a server to its first token."""
    allow_test_verifier: bool = False
    """For tests without a GPU only: accepts a stand-in for sglang's verification kernels."""
