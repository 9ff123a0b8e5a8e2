"""Settings of the trainer side. Every field is reachable as `--trainer.NAME` on the command line."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Decay = Annotated[float, Field(ge=0, lt=1)]


class EstimatorSettings(BaseModel):
    """The policy gradient: see docs/math.md."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    mode: Literal["none", "tis", "mis"] = "none"
    """Importance weight of a token: 1, the ratio p/q cut at tis_clip, or the ratio where it lies in the mis range."""
    centering: Literal["on", "off", "diagnose"] = "on"
    """`diagnose` computes every metric of the correction and applies nothing."""
    tis_clip: float = Field(default=2.0, gt=0)
    """Largest weight of mode tis."""
    mis_low: float = Field(default=0.5, gt=0)
    """Mode mis masks tokens whose ratio is below this."""
    mis_high: float = Field(default=5.0, gt=0)
    """Mode mis masks tokens whose ratio is above this."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> EstimatorSettings:
        if not self.mis_low < self.mis_high:
            raise ValueError(f"mis_low is {self.mis_low} beside mis_high {self.mis_high}; accepted: mis_low < mis_high")
        return self


class TrainerConfig(BaseModel):
    """Optimisation and the Ray workers that do it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    backend: Literal["torch", "megatron"] = "torch"
    """`torch` trains any causal model of transformers; `megatron` dense Qwen3 and Llama with tensor and pipeline
    parallelism (needs the extra of that name)."""
    workers: int = Field(default=1, ge=1)
    """Ranks. torch: all data-parallel (FSDP2 when more than one). megatron: tp x pp x data-parallel."""
    tp: int = Field(default=1, ge=1)
    """Ranks that share every layer and the vocabulary (megatron)."""
    pp: int = Field(default=1, ge=1)
    """Stages that the layers are split into (megatron)."""
    cpus_per_worker: float = Field(default=1.0, ge=0)
    """Logical CPUs that Ray reserves."""
    gpus_per_worker: float = Field(default=0.0, ge=0)
    """Logical GPUs that Ray reserves; below 1 they are shared."""
    timeout_s: float = Field(default=3600.0, gt=0)
    """A placement, a step, an export or a checkpoint that takes longer ends the arm with an error."""
    threads: int = Field(default=1, ge=1)
    """Torch threads of a worker."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU where the worker sees one."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Of the weights that are trained."""
    lr: float = Field(default=3e-4, ge=0)
    """Learning rate of AdamW after the warm-up."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of AdamW's two moments."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to AdamW's denominator."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled decay."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer updates over which the learning rate rises from 0."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The gradient's global norm is cut to this."""
    updates_per_rollout: int = Field(default=2, ge=1)
    """Optimizer updates a rollout: its groups are split into that many mini-batches."""
    micro_tokens: int = Field(default=8192, ge=1)
    """Tokens (prompt and response) of a micro-batch at most; one longer trajectory is a micro-batch of its own."""
    chunk_tokens: int = Field(default=1024, ge=1)
    """Rows of logits the estimator works on at a time."""
    advantage: Literal["raw", "group", "leave_one_out"] = "group"
    """Reward minus a constant, minus its group's mean, or minus the mean of the others of its group."""
    advantage_baseline: float = 0.0
    """`raw` advantages are the reward minus this."""
    advantage_std: bool = True
    """`group` advantages are divided by the group's standard deviation plus 1e-4."""
    reduction: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Every token weighs the same, or every sequence does."""
    content_failure: Literal["stop", "drop_group"] = "stop"
    """What a support overflow or an invalid row does: end the run, or make the prompt's whole group untrainable."""
    max_skipped_updates: int = Field(default=0, ge=0)
    """Updates of an arm that are left out, the weights untouched, because a loss or a gradient is not finite; one more
    ends the arm."""
    bucket_mb: float = Field(default=256.0, gt=0)
    """Weights travel to the engines in buckets of this many MiB at most."""
    estimator: EstimatorSettings = EstimatorSettings()

    @model_validator(mode="after")
    def _check(self) -> TrainerConfig:
        if self.backend == "torch" and (self.tp, self.pp) != (1, 1):
            raise ValueError(f"tp={self.tp} and pp={self.pp} with backend torch; set trainer.backend to megatron")
        if not self.cpus_per_worker + self.gpus_per_worker > 0:
            raise ValueError("cpus_per_worker and gpus_per_worker are both 0; accepted: at least one of them above 0")
        if self.workers % (self.tp * self.pp):
            raise ValueError(
                f"workers={self.workers} ranks cannot be split into tp={self.tp} x pp={self.pp}; "
                "accepted: a multiple of tp x pp, the rest is data-parallel"
            )
        return self
