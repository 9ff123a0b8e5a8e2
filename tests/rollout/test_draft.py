"""The draft against a plain rendering of its architecture, its checkpoint layout, and its path sampler."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.embedded.decoder import Decoder
from rollout.embedded.draft import Draft, walk
from rollout.embedded.draft_config import DraftConfig
from rollout.embedded.transformer import BlockConfig

V, H, BLOCK, RANK, TOP = 40, 24, 5, 6, 4
TARGET = BlockConfig("qwen3", V, H, 32, 4, 2, 1, 16, 1e-6, 10000.0, None, False, 48)
TAPS = (0, 2, 3)


def _target(seed: int = 0) -> Decoder:
    return _randomised(Decoder(TARGET), lambda decoder: decoder.resident_tensors(), seed)


def _draft(target: Decoder, layers: int = 2, selector: bool = True) -> Draft:
    block = dataclasses.replace(TARGET, layers=layers, heads=4, kv_heads=2, head_dim=8)
    chosen = (RANK, TOP) if selector else (0, 0)
    draft = Draft(DraftConfig(block, BLOCK, TAPS, TARGET.layers, V - 1, "<|MASK|>", *chosen), target)
    draft.mask_embedding = torch.empty(H)
    return _randomised(draft, lambda draft: draft.private_tensors(), 1)


def _randomised(model: Any, tensors: Callable[[Any], dict[str, torch.Tensor]], seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors(model).values():
        tensor.normal_(1.0 if tensor.dim() == 1 else 0.0, 0.3, generator=generator)
    return model


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def _rotate(x: torch.Tensor, position: int) -> torch.Tensor:
    half = x.shape[-1] // 2
    angles = position * 10000.0 ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


def _plain_block(draft: Draft, taps: torch.Tensor, anchor: int, start: int) -> torch.Tensor:
    """Hidden states [block - 1, H] of one row, position by position, from checkpoint names; taps [start, K * H]."""
    w, heads, dim = draft.named_hf_tensors(), 4, 8
    context = [_norm(w["fc.weight"] @ row, w["hidden_norm.weight"]) for row in taps]
    mask = draft.private_tensors()["mask_embedding"]
    states = [draft.target.embedding[anchor]] + [mask] * (BLOCK - 1)
    for i in range(draft.config.block.layers):
        get = {name.removeprefix(f"layers.{i}."): t for name, t in w.items() if name.startswith(f"layers.{i}.")}
        qn, kn = get["self_attn.q_norm.weight"], get["self_attn.k_norm.weight"]
        inputs = [_norm(x, get["input_layernorm.weight"]) for x in states]
        keys, values = [], []
        for position, x in enumerate(context + inputs):
            k, v = (get[f"self_attn.{name}_proj.weight"] @ x for name in "kv")
            keys.append(_rotate(_norm(k.view(2, dim), kn), position))
            values.append(v.view(2, dim))
        for j, x in enumerate(inputs):
            q = _rotate(_norm((get["self_attn.q_proj.weight"] @ x).view(heads, dim), qn), start + j)
            mixed = []
            for head in range(heads):
                scores = torch.stack([q[head] @ k[head // 2] for k in keys]) / math.sqrt(dim)
                mixed.append(torch.softmax(scores, 0) @ torch.stack([v[head // 2] for v in values]))
            state = states[j] + get["self_attn.o_proj.weight"] @ torch.cat(mixed)
            y = _norm(state, get["post_attention_layernorm.weight"])
            gated = torch.nn.functional.silu(get["mlp.gate_proj.weight"] @ y) * (get["mlp.up_proj.weight"] @ y)
            states[j] = state + get["mlp.down_proj.weight"] @ gated
    return torch.stack([_norm(x, w["norm.weight"]) for x in states[1:]])


def _append(draft: Draft, taps: torch.Tensor, cache: Any, slots: torch.Tensor, old: list[int], new: list[int]) -> None:
    """Commit positions old[row] .. new[row] - 1 of taps [B, T, K * H], shorter rows padded."""
    width = max(n - o for o, n in zip(old, new, strict=True))
    positions = torch.tensor(old)[:, None] + torch.arange(width)
    positions = positions.where(positions < torch.tensor(new)[:, None], -1)
    rows = torch.arange(len(old))[:, None]
    draft.append(taps[rows, positions.clamp_min(0)], positions, cache, slots)


@torch.no_grad()
def test_cached_blocks_equal_the_plain_architecture() -> None:
    """Ragged rows, scattered slots, an idle row; a second block after more context, over the first one's leavings."""
    draft = _draft(_target())
    taps = torch.randn(3, 20, len(TAPS) * H, generator=torch.Generator().manual_seed(3))
    cache, slots, anchors = draft.new_cache(4), torch.tensor([3, 0, 2]), torch.tensor([7, 11, 2])
    cache.storage.fill_(5.0)
    for old, new in (([0, 0, 0], [9, 4, 12]), ([9, 4, 12], [12, 9, 13])):
        _append(draft, taps, cache, slots, old, new)
        hidden = draft.block_hidden(anchors, torch.tensor(new), cache, slots, max(new) + 1)
        for row, start in enumerate(new):
            expected = _plain_block(draft, taps[row, :start], int(anchors[row]), start)
            assert (hidden[row] - expected).abs().max() < 2e-5, (new, row)
        idle = draft.block_hidden(anchors, torch.tensor([new[0], -1, -1]), cache, slots, max(new) + 1)
        assert (idle[0] - hidden[0]).abs().max() < 2e-5
        assert torch.isfinite(idle).all()


@torch.no_grad()
def test_greedy_takes_the_unary_argmax_and_the_path_reports_the_selector_law() -> None:
    target = _target()
    draft = _draft(target)
    cache = draft.new_cache(2)
    taps = torch.randn(2, 6, len(TAPS) * H, generator=torch.Generator().manual_seed(4))
    draft.append(taps, torch.arange(6).expand(2, -1), cache)
    anchors, starts = torch.tensor([3, 30]), torch.tensor([6, 6])
    hidden = draft.block_hidden(anchors, starts, cache, slice(0, 2), 7)
    logits = hidden @ target.head.T
    assert torch.equal(draft.propose_greedy(anchors, starts, cache, slice(0, 2), 7), logits.argmax(-1))

    uniforms = torch.rand(2, BLOCK - 1, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    temperatures = torch.tensor([0.7, 1.3])
    path = draft.propose_path(anchors, starts, cache, uniforms, temperatures, slice(0, 2), 7)
    weights = draft.named_hf_tensors()
    book = [weights[f"candidate_selector.{side}_codebook"] for side in ("predecessor", "successor")]
    for row in range(2):
        previous = int(anchors[row])
        for slot in range(BLOCK - 1):
            unary, ids = logits[row, slot].topk(TOP)
            state = weights["candidate_selector.hidden_projection.weight"] @ hidden[row, slot]
            scores = unary + book[1][ids] @ (book[0][previous] * state)
            law = torch.softmax(scores.double() / temperatures[row].double(), 0)
            assert torch.equal(path.candidates[row, slot], ids)
            assert (path.probs[row, slot] - law).abs().max() < 1e-5
            pick = int((law.cumsum(0) <= uniforms[row, slot]).sum())
            previous = int(path.tokens[row, slot])
            assert previous == int(ids[pick])


def test_walk_draws_from_its_own_law() -> None:
    """Frequencies of whole paths over a grid of uniforms equal the products of the reported probabilities."""
    generator = torch.Generator().manual_seed(6)
    scores = torch.randn(1, 2, 3, 3, generator=generator)
    scores[:, 0] = scores[:, 0, :1]
    candidates = torch.tensor([[[5, 1, 9], [2, 5, 7]]])
    n = 300
    grid = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    uniforms = torch.cartesian_prod(grid, grid)
    path = walk(candidates.expand(n * n, -1, -1), scores.expand(n * n, -1, -1, -1), uniforms, 0.8)
    first, second = (torch.softmax(scores[0, slot].double() / 0.8, -1) for slot in (0, 1))
    for a in range(3):
        for b in range(3):
            drawn = (path.tokens == torch.stack((candidates[0, 0, a], candidates[0, 1, b]))).all(1)
            expected = float(first[0, a] * second[a, b])
            assert drawn.double().mean() == pytest.approx(expected, abs=3 / n)
            assert torch.allclose(path.probs[drawn][:, 1], second[a], atol=1e-12)


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-53])
def test_walk_never_draws_a_candidate_without_mass(uniform: float) -> None:
    """Nor where the CDF of the candidates with mass rounds to less than the largest uniform."""
    scores = torch.randn(200, 1, 8, 8, generator=torch.Generator().manual_seed(8))
    scores[..., 0] = scores[..., 7] = -1e9
    short = torch.softmax(scores.double(), -1).cumsum(-1)[:, 0, 0, -1] <= uniform
    assert short.any() == (uniform > 0)
    path = walk(torch.arange(8).expand(200, 1, 8), scores, torch.full((200, 1), uniform, dtype=torch.float64), 1.0)
    assert (path.tokens == (6 if uniform else 1)).all()


def test_checkpoint_layout_and_round_trip(tmp_path: Path) -> None:
    target = _target()
    draft = _draft(target)
    draft.save_pretrained(tmp_path, torch.float32)
    stored = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    layer = {
        "input_layernorm.weight": (H,),
        "post_attention_layernorm.weight": (H,),
        "self_attn.q_proj.weight": (32, H),
        "self_attn.k_proj.weight": (16, H),
        "self_attn.v_proj.weight": (16, H),
        "self_attn.o_proj.weight": (H, 32),
        "self_attn.q_norm.weight": (8,),
        "self_attn.k_norm.weight": (8,),
        "mlp.gate_proj.weight": (32, H),
        "mlp.up_proj.weight": (32, H),
        "mlp.down_proj.weight": (H, 32),
    }
    assert stored == {
        "fc.weight": (H, 3 * H),
        "hidden_norm.weight": (H,),
        "norm.weight": (H,),
        "candidate_selector.predecessor_codebook": (V, RANK),
        "candidate_selector.successor_codebook": (V, RANK),
        "candidate_selector.hidden_projection.weight": (RANK, H),
        **{f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()},
    }
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlash2DraftModel"]
    assert (config["block_size"], config["num_target_layers"], config["num_hidden_layers"]) == (BLOCK, 4, 2)
    assert config["dflash_config"] == {
        "mask_token": "<|MASK|>",
        "mask_token_id": V - 1,
        "target_layer_ids": list(TAPS),
        "selector_rank": RANK,
        "selector_top_k": TOP,
    }
    saved = torch.load(tmp_path / "mask_embedding.pt", weights_only=True)
    assert saved["mask_token_id"] == V - 1 and saved["embedding"].shape == (H,)

    again = Draft.from_pretrained(tmp_path, target)
    assert again.config == draft.config
    before, after = draft.private_tensors(), again.private_tensors()
    assert before.keys() == after.keys() and "mask_embedding" in after
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_plain_draft_has_no_selector_and_may_share_the_targets_mask_row(tmp_path: Path) -> None:
    target = _target()
    _draft(target, selector=False).save_pretrained(tmp_path, torch.float32)
    (tmp_path / "mask_embedding.pt").unlink()
    draft = Draft.from_pretrained(tmp_path, target)
    assert not draft.config.selector
    assert not [name for name in draft.private_tensors() if "selector" in name or "mask" in name]
    assert torch.equal(draft.embed_block(torch.tensor([3]))[0, 1:], target.embedding[V - 1].expand(BLOCK - 1, -1))


def test_a_target_update_reaches_the_inputs_and_head_but_no_private_byte() -> None:
    target = _target()
    draft = _draft(target)
    private = {name: tensor.clone() for name, tensor in draft.private_tensors().items()}
    block = draft.embed_block(torch.tensor([3])).clone()
    target.load_hf_tensors(dict(_target(seed=9).named_hf_tensors()))
    assert all(torch.equal(private[name], tensor) for name, tensor in draft.private_tensors().items())
    updated = draft.embed_block(torch.tensor([3]))
    assert torch.equal(updated[0, 0], target.embedding[3]) and not torch.equal(updated[0, 0], block[0, 0])
    assert torch.equal(updated[0, 1:], block[0, 1:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 48, "head_dim": 8}, "hidden_size 48 differs from the target's 24"),
        ({"vocab_size": 41}, "vocab_size 41 differs from the target's 40"),
        ({"num_target_layers": 5}, "num_target_layers 5 differs from the target's 4"),
        ({"dflash_config.target_layer_ids": [0, 2, 4]}, "are not all below the target's 4 layers"),
        ({"dflash_config.target_layer_ids": [0, 2]}, "fc.weight has shape"),
        ({"dflash_config.mask_token_id": 40}, "mask_token_id 40 is outside"),
        ({"dflash_config.mask_token_id": 5}, "was made for mask_token_id 39"),
        ({"dflash_config.selector_top_k": 0}, "must both be set"),
        ({"dflash_config.selector_top_k": 41}, "selector_top_k 41 exceeds"),
        ({"dflash_config.conv_kernel_size": 3}, "conv_kernel_size"),
        ({"dflash_config.final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ({"is_causal": True}, "is_causal"),
        ({"block_size": 1}, "at least 2"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "no supported draft"),
        ({"num_hidden_layers": 3}, "missing .*layers.2"),
        ({"num_hidden_layers": 1}, "unknown .*layers.1"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    target = _target()
    _draft(target).save_pretrained(tmp_path, torch.float32)
    config = json.loads((tmp_path / "config.json").read_text())
    for key, value in change.items():
        outer, _, inner = key.rpartition(".")
        (config[outer] if outer else config)[inner] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        Draft.from_pretrained(tmp_path, target)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    target = _target()
    _draft(target).save_pretrained(tmp_path, torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["candidate_selector.successor_codebook"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="missing .*successor_codebook"):
        Draft.from_pretrained(tmp_path, target)
