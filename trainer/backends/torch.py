"""Any Hugging Face causal language model in plain torch; FSDP2 shards it where there is more than one rank."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from miles_ext.errors import CheckpointError
from miles_ext.logprobs import VocabShard
from trainer.backends.base import LossFn
from trainer.backends.scorer import Scorer
from trainer.batch import Batch
from trainer.config import TrainerConfig


class TorchBackend:
    """Implements trainer.backends.base.Backend. bfloat16 computes in bfloat16 on float32 master weights."""

    def __init__(self, config: TrainerConfig, target: Path, *, rank: int = 0, world_size: int = 1) -> None:
        """target: local Hugging Face folder with safetensors. ValueError where it cannot be trained exactly.

        With world_size > 1 the default process group must be up.
        """
        self.config, self.updates = config, 0
        self.shard: VocabShard | None = None
        self.rank, self.world_size = self.data_rank, self.data_size = rank, world_size
        self.device = pick_device(config.device)
        self.model = load_hf(target, torch.float64 if config.dtype == "float64" else torch.float32, self.device)
        self.scorer = Scorer(self.model, config.chunk_tokens)
        if world_size > 1 or config.dtype == "bfloat16":
            _shard(self.scorer, self.device, config.dtype)
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=config.lr, betas=config.betas, eps=config.eps,
            weight_decay=config.weight_decay, fused=True,
        )  # fmt: skip
        for parameter in self.parameters.values():  # made here, so that `load` has something to load into
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), device=self.device),
                "exp_avg": torch.zeros_like(parameter.detach()),
                "exp_avg_sq": torch.zeros_like(parameter.detach()),
            }

    def forward_backward(self, batches: Sequence[Batch], loss_fns: Sequence[LossFn]) -> torch.Tensor | None:
        found = []
        for batch, loss_fn in zip(batches, loss_fns, strict=True):
            input_ids, rows = (torch.from_numpy(array).to(self.device) for array in (batch.input_ids, batch.rows))
            loss, sums = self.scorer(input_ids, rows, loss_fn)
            loss.backward()
            found += [] if sums is None else [sums]
        return torch.stack(found).sum(0) if found else None

    def whole_rows(self, columns: torch.Tensor | None) -> torch.Tensor | None:
        return columns

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        values = values.to(self.device)
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def grad_norm(self) -> float:
        norm = torch.nn.utils.get_total_norm(self._gradients())
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def non_finite_gradients(self) -> list[str]:
        found = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        return [name for name, gradient in found.items() if not _local(gradient).isfinite().all()]

    def step(self, grad_norm: float) -> float:
        for gradient in self._gradients():
            gradient.mul_(min(1.0, self.config.max_grad_norm / (grad_norm + 1e-6)))
        self.updates += 1
        rate = self.config.lr * min(1.0, self.updates / max(1, self.config.warmup_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.zero_grad()
        return rate

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def export_hf(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.parameters.items():
            tensor = parameter.detach()
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def save_hf(self, folder: Path) -> None:
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self.export_hf() if self.rank == 0}
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            self.model.config.save_pretrained(folder)
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def save(self, folder: Path) -> None:
        try:
            with _quiet_when_alone():
                save_shards({**self._state(), **self._host_state()}, checkpoint_id=folder, no_dist=self.world_size == 1)
        except CheckpointException as error:  # no Exception: nobody would catch it
            reason, _ = next(iter(error.failures.values()))
            raise CheckpointError(f"{folder} could not be written ({reason}); look at the disk's free space") from error

    def load(self, folder: Path) -> None:
        host = self._host_state()
        try:
            with _quiet_when_alone():
                load_shards({**self._state(), **host}, checkpoint_id=folder, no_dist=self.world_size == 1)
        except CheckpointException as error:
            reason, _ = next(iter(error.failures.values()))
            raise CheckpointError(f"{folder} does not fit the model being trained: {reason}") from error
        self.updates = int(host["updates"])
        torch.set_rng_state(host["rng"])

    def _state(self) -> dict[str, dict[str, torch.Tensor]]:
        """The live tensors of model and optimizer: loading writes into them."""
        moments = {name: self.optimizer.state[parameter] for name, parameter in self.parameters.items()}
        return {
            "weights": {name: parameter.detach() for name, parameter in self.parameters.items()},
            **{key: {name: state[key] for name, state in moments.items()} for key in ("step", "exp_avg", "exp_avg_sq")},
        }

    def _host_state(self) -> dict[str, torch.Tensor]:
        return {"updates": torch.tensor(self.updates), "rng": torch.get_rng_state()}

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]


def pick_device(wanted: str) -> torch.device:
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def load_hf(target: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model in `dtype` on `device`, dropout off. ValueError as of `require_fitting`."""
    require_fitting(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype, attn_implementation="sdpa", local_files_only=True)
    cast(nn.Module, model).to(device)
    return model.eval()


def require_fitting(target: Path) -> PretrainedConfig:
    """The model's configuration. ValueError where files and model do not name the same tensors: what is exported under
    other names than it was loaded from would never reach an engine."""
    files = sorted(target.glob("*.safetensors"))
    if not (target / "config.json").is_file() or not files:
        raise ValueError(f"{target} is no Hugging Face folder; accepted: config.json beside *.safetensors")
    stored = {}
    for file in files:
        with safe_open(file, framework="pt") as content:
            stored |= {name: tuple(content.get_slice(name).get_shape()) for name in content.keys()}
    config = AutoConfig.from_pretrained(target, local_files_only=True)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    once = {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()}
    held = {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters(remove_duplicate=False)}
    wrong = {name for name, shape in once.items() if stored.get(name) != shape}
    wrong |= {name for name, shape in stored.items() if held.get(name) != shape}
    if wrong:
        raise ValueError(
            f"{target} does not fit its config.json: {len(wrong)} tensors are missing, unexpected or of another shape, "
            f"first {sorted(wrong)[:3]}; accepted: a checkpoint with exactly the model's tensors"
        )
    return config


def _shard(scorer: Scorer, device: torch.device, dtype: str) -> None:
    """Shard layer by layer and the rest at the root; gradients are summed over ranks, never averaged."""
    if not dist.is_initialized():
        dist.init_process_group(store=HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    low = torch.bfloat16 if dtype == "bfloat16" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
    layer_types = set(scorer.model._no_split_modules or ())
    for module in scorer.modules():
        if type(module).__name__ in layer_types:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(scorer, mesh=mesh, mp_policy=policy)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


@contextmanager
def _quiet_when_alone() -> Iterator[None]:
    """Sharded checkpoints warn of a single process even when told of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
