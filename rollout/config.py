"""Settings of the rollout side. Every field is reachable as `--rollout.NAME` on the command line."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollout.policy import Limits
from rollout.sglang_engine.config import SglangConfig


class MismatchConfig(BaseModel):
    """A declared difference between rollout policy and trainer, for studies (embedded engine). Recorded laws stay the
    rollouts' own."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    quantise: Literal["none", "int8", "int4"] = "none"
    """Matrices of the rollout copy rounded to 8 bits, a scale a row, or 4 bits, a scale for each 32 inputs."""
    noise: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Gaussian noise on them, in units of a matrix's root mean square; one draw a run, the same at every handoff."""
    lag: int = Field(default=0, ge=0)
    """Rollouts are sampled from the weights of so many handoffs ago."""

    def transform(self, seed: int) -> dict[str, Any]:
        """What a manifest declares, for the run of this seed; empty where the weights are served as they are sent."""
        quantise = {} if self.quantise == "none" else {"quantise": self.quantise}
        return quantise | ({"noise": self.noise, "seed": seed} if self.noise else {})


class RolloutConfig(BaseModel):
    """Engines and the Ray workers that hold them."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    engine: Literal["embedded", "sglang"] = "embedded"
    """`embedded` is the engine of this repository, `sglang` a server of an environment of its own."""
    workers: int = Field(default=1, ge=1)
    """Rollout workers, one engine each."""
    cpus_per_worker: float = Field(default=1.0, ge=0)
    """Logical CPUs that Ray reserves."""
    gpus_per_worker: float = Field(default=0.0, ge=0)
    """Logical GPUs that Ray reserves; below 1 they are shared."""
    threads: int = Field(default=1, ge=1)
    """Torch threads of a worker."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU where the worker sees one."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Of the engine's weights; the trainer casts to it at a handoff."""
    max_concurrency: int = Field(default=128, ge=1)
    """Responses decoded at once by one engine (key-value cache slots)."""
    context_length: int = Field(default=512, ge=2)
    """Prompt plus response, in tokens."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """A worker whose call makes no progress for so long is replaced and its requests are issued again."""
    heartbeat_timeout_s: float = Field(default=60.0, gt=0)
    """A worker whose process answers no heartbeat for so long is replaced, whatever it was doing."""
    start_timeout_s: float = Field(default=1800.0, gt=0)
    """From asking Ray for a worker to an engine that is loaded."""
    first_probe_grace_s: float = Field(default=300.0, gt=0)
    """For the first token that an engine decodes, which may compile and capture graphs."""
    probe_timeout_s: float = Field(default=60.0, gt=0)
    """For a token decoded as a health probe later on."""
    probe_interval_s: float = Field(default=60.0, ge=0)
    """A worker that has not decoded for so long has to decode a token before it is given requests."""
    max_restarts: int = Field(default=3, ge=0)
    """Restarts of one worker without an answered batch between them before the run stops."""
    max_failures: int = Field(default=20, ge=0)
    """Restarts of all workers together before the run stops."""
    restart_backoff_s: float = Field(default=5.0, ge=0)
    """Pause before the second restart of a worker in a row, doubled for each further one up to a minute; the first
    comes at once."""
    mismatch: MismatchConfig = MismatchConfig()
    sglang: SglangConfig = SglangConfig()

    def limits(self) -> Limits:
        """What the policy of restarts goes by."""
        return Limits(
            max_restarts=self.max_restarts, max_failures=self.max_failures, backoff_s=self.restart_backoff_s,
            backoff_max_s=60.0, heartbeat_timeout_s=self.heartbeat_timeout_s,
            request_timeout_s=self.request_timeout_s, start_timeout_s=self.start_timeout_s,
            probe_timeout_s=self.probe_timeout_s, first_probe_grace_s=self.first_probe_grace_s,
        )  # fmt: skip

    @property
    def accepts_test_verifier(self) -> bool:
        """Whether an engine may verify with a stand-in, as in tests without a GPU; never for the embedded one."""
        return self.engine == "sglang" and self.sglang.allow_test_verifier

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sglang.urls and len(self.sglang.urls) != self.workers:
            raise ValueError(f"{len(self.sglang.urls)} sglang.urls for {self.workers} workers; accepted: one a worker")
        if self.engine == "sglang" and self.dtype == "float64":
            raise ValueError("dtype is float64 beside engine sglang; accepted: float32, bfloat16")
        if self.engine == "sglang" and self.mismatch.transform(0):
            raise ValueError(
                f"mismatch {self.mismatch.transform(0)} beside engine sglang, which serves weights as they are sent; "
                "accepted: engine embedded, or mismatch.lag alone"
            )
        return self
