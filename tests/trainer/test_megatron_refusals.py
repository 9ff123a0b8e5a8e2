"""What the megatron backend does not take is said in one sentence before any rank is started."""

import json

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from tests.trainer.rollouts import make_llama, make_model
from trainer.backends import megatron_config
from trainer.config import TrainerConfig
from trainer.worker import TrainerGroup

pytestmark = pytest.mark.megatron


def group(target, **layout):
    """Ray is not running: an error of any other kind than the expected one means that something was started."""
    workers = layout.get("tp", 1) * layout.get("pp", 1)
    TrainerGroup(TrainerConfig(backend="megatron", workers=workers, **layout), target, 0)


@pytest.mark.parametrize(
    ("layout", "shape", "message"),
    [
        ({"tp": 2}, {"num_attention_heads": 6, "num_key_value_heads": 3}, "num_key_value_heads=3 .*by tp=2"),
        ({"tp": 4}, {"num_key_value_heads": 4}, "num_attention_heads=2 cannot be split by tp=4"),
        ({"tp": 2}, {"num_key_value_heads": 2, "intermediate_size": 97}, "intermediate_size=97 .*by tp=2"),
        ({"pp": 3}, {}, "num_hidden_layers=2 cannot be split by pp=3"),
        ({"tp": 4, "pp": 3}, {}, "attention_heads=2 .*hidden_layers=2"),
        ({}, {"attention_bias": True}, "attention_bias is True, accepted False"),
        ({}, {"hidden_act": "gelu"}, "hidden_act is gelu, accepted silu"),
        ({}, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "layer_types is .*sliding"),
        ({}, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type is linear"),
    ],
)
def test_a_layout_or_model_it_cannot_split_or_compute(tmp_path, layout, shape, message):
    with pytest.raises(ValueError, match=message):
        group(make_model(tmp_path / "model", **shape), **layout)


def test_another_architecture(tmp_path):
    config = Qwen2Config(
        vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="is a qwen2 model; .*accepts dense qwen3 and llama; set .*to torch"):
        group(tmp_path / "model")


def test_a_folder_whose_files_do_not_fit(tmp_path):
    target = make_llama(tmp_path / "model")
    settings = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 3}))
    with pytest.raises(ValueError, match="does not fit its config.json"):
        group(target)
    assert LlamaConfig.from_pretrained(target).num_hidden_layers == 3


def test_megatron_core_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(megatron_config, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="megatron-core, which is not installed; pip install -r requirements/megatron"):
        group(make_model(tmp_path / "model"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp": 2, "workers": 2}, "tp=2 and pp=1 with backend torch; set trainer.backend to megatron"),
        ({"backend": "megatron", "tp": 2, "pp": 2, "workers": 6}, "workers=6 ranks cannot be split into tp=2 x pp=2"),
        ({"backend": "megatron", "tp": 0}, "greater than or equal to 1"),
    ],
)
def test_ranks_that_do_not_add_up(settings, message):
    with pytest.raises(ValueError, match=message):
        TrainerConfig(**settings)
