"""The decoder against transformers on random small models, and its weights and cache."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rollout.embedded.decoder import Decoder

SHAPE: dict[str, Any] = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
)
PLAIN_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 20000.0}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def _model(kind: str) -> PreTrainedModel:
    torch.manual_seed(1)
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=False, rope_parameters=PLAIN_ROPE))
    elif kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0, 0.1) if parameter.dim() == 1 else parameter.normal_(0.0, 0.15)
    return model.eval()


@pytest.fixture(scope="module", params=["qwen3", "llama", "llama3-rope"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    model = _model(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder


def _tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, SHAPE["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def test_logits_equal_transformers(pair: tuple[PreTrainedModel, Path]) -> None:
    model, folder = pair
    tokens = _tokens(3, 60)
    expected = model(tokens).logits
    decoder = Decoder.from_hf(folder)
    hidden, taps = decoder.forward(tokens, torch.arange(60).expand(3, -1))
    assert taps is None
    assert expected.std() > 0.5
    assert (decoder.logits(hidden) - expected).abs().max() < 5e-5


@torch.no_grad()
def test_ragged_rows_through_the_cache_equal_transformers(pair: tuple[PreTrainedModel, Path]) -> None:
    """A padded ragged prefill, then blocks at each row's own position, in scattered slots of a dirty cache."""
    model, folder = pair
    decoder = Decoder.from_hf(folder)
    tokens, lengths, slots = _tokens(3, 40), [20, 9, 31], torch.tensor([4, 0, 2])
    outputs = model(tokens, output_hidden_states=True)
    cache = decoder.new_cache(5, 48)
    cache.storage.fill_(7.0)  # what other sequences left behind
    prompt = torch.full((3, 31), -1)
    for row, length in enumerate(lengths):
        prompt[row, :length] = torch.arange(length)
    hidden, _ = decoder.forward(tokens.gather(1, prompt.clamp_min(0)), prompt, cache, slots, 31)
    for row, length in enumerate(lengths):
        assert (decoder.logits(hidden)[row, :length] - outputs.logits[row, :length]).abs().max() < 5e-5
    block = torch.tensor(lengths)[:, None] + torch.arange(6)
    hidden, taps = decoder.forward(tokens.gather(1, block), block, cache, slots, 37, taps=(0, 1))
    assert taps is not None
    rows = torch.arange(3)[:, None]
    assert (decoder.logits(hidden) - outputs.logits[rows, block]).abs().max() < 5e-5
    # hidden_states[i + 1] is the residual stream after layer i.
    expected = torch.cat(outputs.hidden_states[1:3], -1)
    assert (taps - expected[rows, block]).abs().max() < 5e-5


@torch.no_grad()
def test_float64_and_bfloat16_follow_float32(pair: tuple[PreTrainedModel, Path]) -> None:
    _, folder = pair
    tokens, positions = _tokens(2, 30), torch.arange(30).expand(2, -1)
    logits = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        decoder = Decoder.from_hf(folder, dtype=dtype)
        logits[dtype] = decoder.logits(decoder.forward(tokens, positions)[0])
        assert logits[dtype].dtype == dtype
    assert (logits[torch.float32] - logits[torch.float64]).abs().max() < 5e-5
    gap = (logits[torch.float32] - logits[torch.bfloat16]).abs()
    assert gap.mean() < 0.05 * logits[torch.float32].std()


@torch.no_grad()
def test_idle_rows_and_positions_past_the_end_leave_no_trace(pair: tuple[PreTrainedModel, Path]) -> None:
    _, folder = pair
    decoder = Decoder.from_hf(folder)
    cache = decoder.new_cache(3, 16)
    tokens = _tokens(3, 4)
    positions = torch.tensor([[0, 1, 2, 3], [-1, -1, -1, -1], [14, 15, 16, 17]])
    hidden, _ = decoder.forward(tokens, positions, cache, slice(0, 3), 16)
    assert torch.isfinite(hidden).all()
    assert cache.storage[:, :, 0, :, :4].abs().amin(-1).gt(0).all()
    assert not cache.storage[:, :, 0, :, 4:].any()
    assert not cache.storage[:, :, 1].any()
    assert not cache.storage[:, :, 2, :, :14].any()


@torch.no_grad()
def test_moved_slots_continue_like_the_originals(pair: tuple[PreTrainedModel, Path]) -> None:
    _, folder = pair
    decoder = Decoder.from_hf(folder)
    tokens = _tokens(2, 12)
    cache = decoder.new_cache(4)
    decoder.forward(tokens[:, :11], torch.arange(11).expand(2, -1), cache, torch.tensor([1, 3]), 11)
    last = torch.full((2, 1), 11)
    expected, _ = decoder.forward(tokens[:, 11:], last, cache, torch.tensor([1, 3]), 12)
    cache.move(torch.tensor([3, 1]), torch.tensor([0, 2]), 11)
    moved, _ = decoder.forward(tokens[:, 11:], last, cache, torch.tensor([2, 0]), 12)
    assert torch.equal(moved, expected)


def test_hf_names_are_views_of_every_resident_byte(pair: tuple[PreTrainedModel, Path]) -> None:
    model, folder = pair
    decoder = Decoder.from_hf(folder)
    named = dict(decoder.named_hf_tensors())
    expected = dict(model.named_parameters())  # a tied head once
    assert set(named) == set(expected)
    assert all(torch.equal(named[name], expected[name]) for name in named)
    resident = decoder.resident_tensors()
    assert sum(t.numel() for t in named.values()) == sum(t.numel() for t in resident.values())
    for tensor in named.values():
        tensor.fill_(3.0)
    assert all((tensor == 3.0).all() for tensor in resident.values())


@torch.no_grad()
def test_handed_over_weights_land_in_place(pair: tuple[PreTrainedModel, Path]) -> None:
    model, folder = pair
    decoder = Decoder.from_hf(folder)
    held = decoder.resident_tensors()
    new = {name: tensor * 1.1 for name, tensor in model.named_parameters()}
    names = sorted(new)
    decoder.load_hf_tensors({name: new[name] for name in names[:7]})
    decoder.load_hf_tensors({name: new[name] for name in names[7:]})
    assert all(torch.equal(tensor, new[name]) for name, tensor in decoder.named_hf_tensors())
    assert all(held[name] is tensor for name, tensor in decoder.resident_tensors().items())
    before = {name: tensor.clone() for name, tensor in held.items()}
    with pytest.raises(ValueError, match="model.nonsense"):
        decoder.load_hf_tensors({"model.norm.weight": new["model.norm.weight"] * 2, "model.nonsense": new[names[0]]})
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(5,\)"):
        decoder.load_hf_tensors({"model.norm.weight": torch.zeros(5)})
    assert all(torch.equal(before[name], tensor) for name, tensor in held.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "missing .*layers.1.mlp.up_proj"),
        (lambda t: t.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(2)}), "unknown .*layers.9.mlp.up_proj"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), "model.norm.weight has shape"),
    ],
)
def test_broken_checkpoints_are_refused(tmp_path: Path, change, message: str) -> None:
    _model("qwen3").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        Decoder.from_hf(tmp_path)


@pytest.mark.parametrize(
    "setting",
    [{"model_type": "gpt2"}, {"attention_bias": True}, {"hidden_act": "gelu"}, {"use_sliding_window": True},
     {"rope_parameters": {"rope_type": "yarn"}}],
)  # fmt: skip
def test_unsupported_features_are_refused(tmp_path: Path, setting: dict[str, object]) -> None:
    _model("qwen3").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | setting
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="not supported"):
        Decoder.from_hf(tmp_path)


@torch.no_grad()
def test_shards_and_the_older_rope_key_load_alike(tmp_path: Path) -> None:
    model = _model("qwen3")
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "parts", max_shard_size="40KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    config = json.loads((tmp_path / "parts/config.json").read_text())
    assert config.pop("rope_parameters")["rope_theta"] == 20000.0
    (tmp_path / "parts/config.json").write_text(json.dumps(config | {"rope_theta": 20000.0}))
    tokens, positions = _tokens(1, 20), torch.arange(20)[None]
    outputs = [Decoder.from_hf(tmp_path / name).forward(tokens, positions)[0] for name in ("whole", "parts")]
    assert torch.equal(outputs[0], outputs[1])


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        Decoder.from_hf(tmp_path)
    _model("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors does not exist"):
        Decoder.from_hf(tmp_path)
