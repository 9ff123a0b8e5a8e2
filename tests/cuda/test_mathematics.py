"""The same numbers on a GPU as on the CPU: laws, draws, heads, the fused pass and the loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from miles_ext.law import head, invalid, law, residual, sample
from miles_ext.lm_head import support_head
from miles_ext.score_centering import EstimatorConfig, SupportTensors, loss_from_support_logits, score_centered_loss

pytestmark = pytest.mark.cuda
N, V = 33, 5003


def noise(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def settings_():
    k = np.where(np.arange(N) % 3 == 0, 0, 40)
    p = np.where(np.arange(N) % 2 == 0, 1.0, 0.9)
    return np.linspace(0.5, 1.5, N), k, p


@pytest.mark.parametrize("filter_order", ["top_k_first", "joint"])
def test_laws_and_draws(filter_order):
    logits = (noise(N, V, seed=1) * 4).round() / 2  # ties everywhere
    logits[5, 7] = torch.nan
    here, there = (law(logits.to(device), *settings_(), filter_order) for device in ("cpu", "cuda"))
    assert torch.equal(invalid(here), invalid(there).cpu())
    good = ~invalid(here)
    assert torch.equal(here[good] > 0, there.cpu()[good] > 0)
    assert (here[good] - there.cpu()[good]).abs().max() <= 1e-6
    uniforms = torch.rand(N, generator=torch.Generator().manual_seed(2), dtype=torch.float64).cuda()
    for _ in range(50):
        uniforms = (uniforms * 7.31) % 1
        drawn = sample(there, uniforms)
        assert drawn[5] == -1 and (there[good.cuda()].gather(1, drawn[good.cuda(), None]) > 0).all()


def test_a_gap_is_never_hit_by_a_parallel_scan():
    generator = torch.Generator().manual_seed(3)
    probs = torch.rand(150_000, generator=generator) * (torch.rand(150_000, generator=generator) < 0.01)
    probs = (probs / probs.sum()).cuda()
    steps = probs.cumsum(0, dtype=torch.float64)
    steps = (steps / steps[-1]).unique()[:256]
    for uniforms in (steps, torch.nextafter(steps, torch.ones_like(steps)), 1 - steps * 1e-9):
        drawn = sample(probs.expand(len(uniforms), -1), uniforms.clamp(0, np.nextafter(1.0, 0.0)))
        assert (probs[drawn] > 0).all()


def test_heads_and_residuals():
    probs = law(noise(N, V, seed=4), 0.7, 0, 0.5)
    assert (head(probs, 32)[1] - head(probs.cuda(), 32)[1].cpu()).abs().max() <= 1e-6
    other = law(noise(N, V, seed=5))
    assert (residual(probs, other) - residual(probs.cuda(), other.cuda()).cpu()).abs().max() <= 1e-7


def problem(kind, device, dtype):
    hidden, weight = noise(N, 24, seed=6, dtype=torch.float64), 0.5 * noise(V, 24, seed=7, dtype=torch.float64)
    q = torch.softmax(hidden @ weight.t() + 0.4 * noise(N, V, seed=8, dtype=torch.float64), -1)
    values, ids = q.topk(16)
    values = values / values.sum(-1, keepdim=True) if kind == "complete" else values
    support = SupportTensors.from_arrays(
        ids.flatten().numpy(), values.log().flatten().numpy(), np.arange(N + 1) * 16,
        ids[:, 1].numpy(), values[:, 1].log().numpy(), kind, device,
    )  # fmt: skip
    inputs = [t.to(device, dtype).requires_grad_() for t in (hidden, weight)]
    return inputs, support, noise(N, seed=9, dtype=torch.float64).to(device)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)])
@pytest.mark.parametrize("kind", ["complete", "head"])
@pytest.mark.parametrize("mode", ["none", "tis", "mis"])
def test_loss_metrics_and_gradients(kind, mode, dtype, tolerance):
    cfg = EstimatorConfig(mode)
    (hidden, weight), support, advantages = problem(kind, "cpu", torch.float64)
    expected, metrics = score_centered_loss(hidden @ weight.t(), support, advantages, cfg, 0.8)
    grads = torch.autograd.grad(expected.sum(), [hidden, weight])
    (hidden, weight), support, advantages = problem(kind, "cuda", dtype)
    results = [score_centered_loss(hidden @ weight.t(), support, advantages, cfg, 0.8)]
    if kind == "complete":
        at = support_head(hidden, weight, support.sampled, support.token_ids, support.rows, 0.8, chunk=10)
        results.append(loss_from_support_logits(at, support, advantages, cfg, 0.8))
    for loss, names in results:
        assert (loss.cpu() - expected).abs().max() <= tolerance * expected.abs().max()
        for name in metrics:
            assert (names[name].cpu() - metrics[name]).abs().max() <= tolerance * (1 + metrics[name].abs().max()), name
        for a, b in zip(torch.autograd.grad(loss.sum(), [hidden, weight]), grads, strict=True):
            assert (a.cpu() - b).abs().max() <= tolerance * b.abs().max()
