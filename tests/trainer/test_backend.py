import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CohereConfig, LlamaConfig

from tests.trainer.rollouts import make_model, make_rollout
from trainer.backends.torch import TorchBackend
from trainer.config import TrainerConfig
from trainer.step import train_step


def test_what_is_no_model_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no Hugging Face folder"):
        TorchBackend(TrainerConfig(), tmp_path)


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_weights_that_do_not_fit_are_refused(tmp_path, change):
    target = make_model(tmp_path / "model")
    tensors = load_file(target / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del tensors[name]
    elif change == "unexpected":
        tensors["model.layers.9.extra"] = torch.zeros(2)
        name = "model.layers.9.extra"
    else:
        tensors[name] = tensors[name][1:].clone()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"does not fit its config.json.*{name}"):
        TorchBackend(TrainerConfig(), target)


def test_a_model_that_scales_its_logits_is_refused(tmp_path):
    config = CohereConfig(
        vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, logit_scale=0.25, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "scaled")
    with pytest.raises(ValueError, match="alters its logits after the LM head"):
        TorchBackend(TrainerConfig(), tmp_path / "scaled")


def test_llama_trains_as_well(tmp_path):
    config = LlamaConfig(
        vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "llama")
    backend = TorchBackend(TrainerConfig(), tmp_path / "llama")
    found = train_step(backend, make_rollout(tmp_path / "llama"), TrainerConfig(), temperature=1.0)
    assert found["train/grad_norm"] > 0 and found["train/train_rollout_logprob_abs_diff"] < 0.1
    assert json.loads((tmp_path / "llama" / "config.json").read_text())["model_type"] == "llama"


def test_dropout_is_off(tmp_path):
    target = make_model(tmp_path / "model", attention_dropout=0.9)
    rollout = make_rollout(target, groups=2)
    config = TrainerConfig(lr=0.0, updates_per_rollout=1)
    found = [train_step(TorchBackend(config, target), rollout, config, temperature=1.0) for _ in range(2)]
    assert found[0] == found[1] and found[0]["train/train_rollout_logprob_abs_diff"] < 1e-5
