"""Dense Qwen3 and Llama on megatron-core: tensor, pipeline and data parallel; NCCL on GPUs, gloo without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed, set_tensor_model_parallel_attributes
from safetensors.torch import save_file
from torch._C._distributed_c10d import HashStore
from transformers import PretrainedConfig

from miles_ext.lm_head import head_loss
from miles_ext.logprobs import VocabShard
from trainer.backends.base import LossFn
from trainer.backends.megatron_config import DTYPES, check, transformer_config
from trainer.backends.megatron_cpu import on_host
from trainer.backends.megatron_names import layout, padded
from trainer.backends.megatron_packed import PackedAttention, PackedRotary, pack
from trainer.backends.megatron_state import Folder, State, tensor_group
from trainer.backends.torch import pick_device
from trainer.batch import Batch
from trainer.config import TrainerConfig


class MegatronBackend:
    """Implements trainer.backends.base.Backend.

    float32 and bfloat16 (on float32 master weights) use the distributed optimizer; float64, which it does not take, is
    reduced and updated in float64 on every data rank.
    """

    def __init__(self, config: TrainerConfig, target: Path, *, rank: int = 0, world_size: int = 1) -> None:
        """target: local Hugging Face folder with safetensors. ValueError as of megatron_config.check.

        With world_size > 1 the default process group must be up.
        """
        self.hf = check(config, target)
        self.config, self.rank, self.world_size, self.updates = config, rank, world_size, 0
        self.device = pick_device(config.device)
        if not dist.is_initialized():
            dist.init_process_group(store=HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(config.tp, config.pp, create_gloo_process_groups=False)
        self.data_rank = parallel_state.get_data_parallel_rank()
        self.data_size = parallel_state.get_data_parallel_world_size()
        self.tp_rank = parallel_state.get_tensor_model_parallel_rank()
        self.stage = parallel_state.get_pipeline_model_parallel_rank()
        self.shard = vocab_shard(self.hf, config.tp, self.tp_rank)
        with self._on_device():
            self._build(target)
        self.zero_grad()

    def forward_backward(self, batches: Sequence[Batch], loss_fns: Sequence[LossFn]) -> torch.Tensor | None:
        found: list[torch.Tensor] = []
        no_count = torch.zeros((), dtype=torch.int, device=self.device)

        def forward_step(work: Iterator[tuple[Batch, LossFn]], model: Any) -> tuple[torch.Tensor, Any]:
            batch, loss_fn = next(work)
            packed = pack(batch, self.device)
            self.rotary.packed, rows = packed, packed.rows
            assert rows is not None

            def loss(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
                scored = hidden[:, 0].index_select(0, rows)
                value, sums = head_loss(scored, self._head, self.head_weights, self.config.chunk_tokens, loss_fn)
                found.extend([] if sums is None else [sums])
                return value, no_count, {}

            return model(packed.input_ids, None, None, packed_seq_params=packed), loss

        with self._on_device():
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=zip(batches, loss_fns, strict=True),
                model=[self.ddp],
                num_microbatches=len(batches),
                seq_length=1,  # each micro-batch announces its own
                micro_batch_size=1,
                forward_only=False,
            )
        return torch.stack(found).sum(0) if found and self.tp_rank == 0 else None

    def whole_rows(self, columns: torch.Tensor | None) -> torch.Tensor | None:
        found: list[Any] = [None] * self.world_size
        dist.gather_object(columns, found if self.rank == 0 else None, 0)
        if self.rank != 0:
            return None
        # Ranks of one stage that share a vocabulary follow one another in order.
        return torch.cat([part for part in found if part is not None], 1)[:, : self.hf.vocab_size].contiguous()

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        values = values.to(self.device)
        dist.all_reduce(values)
        return values

    def grad_norm(self) -> float:
        self.optimizer.prepare_grads()
        own = self.optimizer.get_main_grads_for_grad_norm()  # each element once over all ranks of the group
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        if own:
            square += torch.nn.utils.get_total_norm(own).double().square()
        dist.all_reduce(square, group=self.optimizer.get_grad_stats_parallel_group())
        return float(square.sqrt())

    def non_finite_gradients(self) -> list[str]:
        gradients = {name: cast(Any, parameter).main_grad for name, parameter in self.state.parameters.items()}
        return [name for name, gradient in gradients.items() if not gradient.isfinite().all()]

    def step(self, grad_norm: float) -> float:
        for parameter in self.optimizer.get_parameters():
            parameter.grad.mul_(min(1.0, self.config.max_grad_norm / (grad_norm + 1e-6)))
        self.updates += 1
        rate = self.config.lr * min(1.0, self.updates / max(1, self.config.warmup_steps))
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = rate, self.config.weight_decay
        with self._on_device():
            self.optimizer.step_with_ready_grads()
        self.zero_grad()
        return rate

    def zero_grad(self) -> None:
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def export_hf(self) -> Iterator[tuple[str, torch.Tensor]]:
        """On rank 0; the first rank of each later stage sends it one tensor after the other."""
        for stage in range(self.config.pp):
            first = stage * self.config.tp * self.data_size
            if stage == self.stage:
                for name in self.state.names():
                    for hf, tensor in self.state.gather(name, "parameter"):
                        if self.rank == 0:
                            yield hf, tensor
                        elif self.rank == first:
                            dist.send_object_list([(hf, tensor.shape, tensor.dtype)], 0)
                            dist.send(tensor.contiguous(), 0)
                if self.rank == first != 0:
                    dist.send_object_list([None], 0)
            elif self.rank == 0:
                while (header := _received(first)) is not None:
                    tensor = torch.empty(header[1], dtype=header[2], device=self.device)
                    dist.recv(tensor, first)
                    yield header[0], tensor

    def save_hf(self, folder: Path) -> None:
        tensors = {name: tensor.cpu().clone() for name, tensor in self.export_hf()}
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            self.hf.save_pretrained(folder)
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def save(self, folder: Path) -> None:
        self.state.save(folder, self.updates)

    def load(self, folder: Path) -> None:
        self.updates = self.state.load(folder)

    def _build(self, target: Path) -> None:
        config, dtype = self.config, DTYPES[self.config.dtype]
        about = transformer_config(self.hf, config)
        about.finalize_model_grads_func = _reduce
        if self.device.type == "cuda":
            model_parallel_cuda_manual_seed(0)
        self.model: Any = HiddenStates(
            about,
            _layers(about),
            vocab_size=padded(self.hf.vocab_size, config.tp),
            max_sequence_length=self.hf.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=self.hf.tie_word_embeddings,
            position_embedding_type="rope",
            rotary_base=self.hf.rope_parameters["rope_theta"],
        ).to(self.device, dtype)
        self.rotary = self.model.rotary_pos_emb = PackedRotary(self.model.rotary_pos_emb)
        self.head_weights = []
        if self.model.post_process:
            tied = self.hf.tie_word_embeddings
            weight = self.model.shared_embedding_or_output_weight() if tied else self.model.output_layer.weight
            self.head_weights = [weight]
        sharded = config.dtype != "float64"
        first_layer = self.model.decoder.layers[0].layer_number - 1
        layouts = {name: layout(name, first_layer, self.hf, config.tp) for name, _ in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            if layouts[name].kind != "copied":  # else only the first tensor rank would count it in the gradient norm
                set_tensor_model_parallel_attributes(parameter, True, 1 if layouts[name].kind == "columns" else 0, 1)
        self.ddp = DistributedDataParallel(
            about,
            DistributedDataParallelConfig(grad_reduce_in_fp32=sharded, use_distributed_optimizer=sharded),
            self.model,
        )
        chained: Any = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=config.lr, weight_decay=config.weight_decay, adam_beta1=config.betas[0],
                adam_beta2=config.betas[1], adam_eps=config.eps, bf16=config.dtype == "bfloat16", params_dtype=dtype,
                use_distributed_optimizer=sharded,
            ),
            [self.ddp],
            use_gloo_process_groups=False,
        )  # fmt: skip
        (self.optimizer,) = chained.chained_optimizers  # one, without experts
        self.state = State(self.model, self.optimizer, layouts, identity(self.hf))
        self.state.load_weights(Folder(target))

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] -> this rank's columns [n, v] of the logits."""
        return self.model.output_layer(hidden[:, None], weight=self.head_weights[0])[0][:, 0]

    def _on_device(self) -> AbstractContextManager[None]:
        return nullcontext() if self.device.type == "cuda" else on_host()


class HiddenStates(GPTModel):
    """Stops before the LM head: only scored rows pass it, a chunk at a time."""

    def _postprocess(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states


def vocab_shard(hf: PretrainedConfig, tp: int, rank: int) -> VocabShard | None:
    if tp == 1:
        return None
    rows = padded(hf.vocab_size, tp) // tp
    return VocabShard(tensor_group(), rank * rows, hf.vocab_size)


def identity(hf: PretrainedConfig) -> dict[str, Any]:
    """What two models must share for one's checkpoint to be the other's."""
    names = (
        "model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
        "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings",
    )  # fmt: skip
    return {name: getattr(hf, name, None) for name in names}


def _layers(about: Any) -> Any:
    spec: Any = get_gpt_layer_local_spec(qk_layernorm=about.qk_layernorm, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    return spec


def _reduce(model: list[Any], _: torch.Tensor | None = None, **kwargs: Any) -> None:
    """Sums over data ranks, of q/k norms over tensor ranks and of a tied table over stages; divides by nothing."""
    finalize_model_grads(model, None, **kwargs)


def _received(source: int) -> Any:
    header: list[Any] = [None]
    dist.recv_object_list(header, source)
    return header[0]
