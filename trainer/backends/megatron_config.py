"""Which models and rank layouts the megatron backend takes, and what megatron-core is told about them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig

from trainer.backends.megatron_names import head_dim
from trainer.backends.torch import require_fitting
from trainer.config import TrainerConfig

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def check(config: TrainerConfig, target: Path) -> PretrainedConfig:
    """The model's configuration. ValueError listing all that stands in the way; starts nothing, needs no ranks."""
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        raise ValueError(
            "trainer.backend megatron needs megatron-core, which is not installed; "
            "pip install -r requirements/megatron.txt, or set trainer.backend to torch"
        )
    hf = require_fitting(target)
    if hf.model_type not in ("qwen3", "llama"):
        raise ValueError(
            f"{target} is a {hf.model_type} model; trainer.backend megatron accepts dense qwen3 and llama; "
            "set trainer.backend to torch"
        )
    wrong = [
        f"{name}={getattr(hf, name)} cannot be split by {kind}={parts}"
        for name, kind, parts in (
            ("num_attention_heads", "tp", config.tp), ("num_key_value_heads", "tp", config.tp),
            ("intermediate_size", "tp", config.tp), ("num_hidden_layers", "pp", config.pp),
        )
        # Fewer key/value heads than ranks: several ranks share one.
        if getattr(hf, name) % parts and not (name == "num_key_value_heads" and parts % getattr(hf, name) == 0)
    ]  # fmt: skip
    rope = getattr(hf, "rope_parameters", None) or {}
    plain = {
        "hidden_act": (hf.hidden_act, "silu"),
        "attention_bias": (bool(getattr(hf, "attention_bias", False)), False),
        "mlp_bias": (bool(getattr(hf, "mlp_bias", False)), False),
        "rope_type": (rope.get("rope_type", "default"), "default"),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", 1.0), 1.0),
        "layer_types": (set(getattr(hf, "layer_types", None) or ()) - {"full_attention"}, set()),
    }
    wrong += [f"{name} is {found}, accepted {taken}" for name, (found, taken) in plain.items() if found != taken]
    if wrong:
        raise ValueError(f"trainer.backend megatron cannot train {target}: {'; '.join(wrong)}")
    return hf


def transformer_config(hf: PretrainedConfig, config: TrainerConfig) -> TransformerConfig:
    """Plain torch kernels throughout: every fused one needs CUDA, apex or Transformer Engine."""
    from megatron.core.transformer import TransformerConfig

    dtype = DTYPES[config.dtype]
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=head_dim(hf),
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=hf.model_type == "qwen3",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=config.tp,
        pipeline_model_parallel_size=config.pp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the default is refused beside variable lengths, experts or not
        batch_p2p_comm=False,
        calculate_per_token_loss=True,  # gradients are summed over data ranks, never averaged
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        cross_entropy_loss_fusion=False,
    )
