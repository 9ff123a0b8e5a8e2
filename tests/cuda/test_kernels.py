"""The Triton kernels against float64 on the host: fresh random inputs, poisoned outputs, real vocabularies."""

import numpy as np
import pytest
import torch

from miles_ext import cuda_kernels, logprobs
from miles_ext.score_centering import EstimatorConfig, SupportTensors, score_centered_loss
from miles_ext.segments import Segments

pytestmark = pytest.mark.cuda
VOCABULARIES = (151_936, 248_320)


def fresh(n: int, v: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(n, v, device="cuda") * 4 + 10 * torch.randn(n, 1, device="cuda")).to(dtype)


@pytest.mark.parametrize("v", [*VOCABULARIES, 1, 7, 8192, 8193])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_forward_equals_float64(v, dtype, temperature):
    logits = fresh(13, v, dtype)
    top, total, weighted = cuda_kernels.row_stats(logits, temperature, entropy=True)
    z = logits.double().cpu() / temperature
    lse = (top + total.log()).double().cpu()
    torch.testing.assert_close(lse, z.logsumexp(-1), rtol=3e-7, atol=3e-6)
    p = z.softmax(-1)
    entropy = (total.log() - weighted / total).double().cpu()
    torch.testing.assert_close(entropy, -torch.xlogy(p, p).sum(-1), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("v", [*VOCABULARIES, 1, 7, 4097])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_writes_every_element_and_nothing_else(v, dtype):
    n, pad = 9, 5
    logits = fresh(n, v + pad, dtype)[:, :v]  # a row stride that is not the width
    heat = torch.rand(n, device="cuda") + 0.5
    z = logits.double() / heat[:, None].double()
    scale = torch.randn(n, device="cuda")
    room = torch.full((n + 1, v + pad), float("nan"), dtype=dtype, device="cuda")
    out = room[:n, :v]
    cuda_kernels.softmax_gradient_(out, logits, heat, z.logsumexp(-1).float(), scale)
    expected = (scale / heat)[:, None].double() * z.softmax(-1)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=1e-12)
    assert room[:n, v:].isnan().all() and room[n].isnan().all()


def test_shards_of_nothing_and_non_finite_rows():
    logits = torch.full((4, 1000), -torch.inf, device="cuda")
    logits[1, 3] = 0.0
    logits[2] = float("nan")
    logits[3, 5] = torch.inf
    top, total, _ = cuda_kernels.row_stats(logits, 1.0, entropy=True)
    lse = top + total.log()
    assert total[0] == 0 and lse[1] == 0
    assert not lse[2].isfinite() and not lse[3].isfinite()


def problem(v: int, lengths: np.ndarray, kind, seed: int):
    """Trainer logits in float64 on the host and a sampler that is the trainer plus logit noise."""
    torch.manual_seed(seed)
    n = len(lengths)
    z = torch.randn(n, v, dtype=torch.float64) * 3
    q_logits = z + 0.3 * torch.randn(n, v, dtype=torch.float64)
    ids, logprobs_, sampled, sampled_lp = [], [], [], []
    for row, length in enumerate(lengths):
        lq, top = q_logits[row].log_softmax(-1).topk(int(length))
        if kind == "complete":
            lq = lq - lq.logsumexp(-1)
            pick = int(torch.multinomial(lq.exp(), 1))
            sampled.append(int(top[pick]))
            sampled_lp.append(float(lq[pick]))
        else:
            token = int(torch.multinomial(q_logits[row].softmax(-1), 1))
            sampled.append(token)
            sampled_lp.append(float(q_logits[row].log_softmax(-1)[token]))
        ids.append(top)
        logprobs_.append(lq)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    arrays = (torch.cat(ids).numpy(), torch.cat(logprobs_).numpy(), offsets, np.array(sampled), np.array(sampled_lp))
    advantages = torch.randn(n, dtype=torch.float64)
    return z, arrays, advantages


@pytest.mark.parametrize("v", VOCABULARIES)
@pytest.mark.parametrize("mode", ["none", "tis", "mis"])
@pytest.mark.parametrize("shape", ["head32", "head128", "complete"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_estimator_on_the_device_equals_float64_on_the_host(v, mode, shape, dtype):
    if shape == "complete":
        kind, lengths = "complete", np.array([1, 4096, 17, 2, 1000, 33, 4095, 64])
    else:
        kind, lengths = "head", np.full(8, int(shape.removeprefix("head")))
    z, arrays, advantages = problem(v, lengths, kind, seed=v % 97 + len(mode) + len(shape))
    z = z.to(dtype).double()  # the same numbers on both sides
    cfg = EstimatorConfig(mode=mode, centering="on")
    reference = z.clone().requires_grad_()
    loss, _ = score_centered_loss(reference, SupportTensors.from_arrays(*arrays, kind), advantages, cfg, 0.7)
    loss.sum().backward()
    ids, lq, offsets, sampled, sampled_lq = arrays
    device_support = SupportTensors.from_arrays(
        ids, lq.astype(np.float32), offsets, sampled, sampled_lq.astype(np.float32), kind, device="cuda"
    )
    logits = z.to(dtype).cuda().requires_grad_()
    found, _ = score_centered_loss(logits, device_support, advantages.float().cuda(), cfg, 0.7)
    found.sum().backward()
    assert reference.grad is not None and logits.grad is not None
    got = logits.grad.double().cpu()
    assert got.isfinite().all()
    error = (got - reference.grad).norm() / reference.grad.norm()
    assert error < (5e-3 if dtype == torch.bfloat16 else 2e-5), float(error)
    torch.testing.assert_close(found.double().cpu(), loss.detach(), rtol=2e-4, atol=2e-4)


def test_the_kernels_are_what_logprobs_uses(monkeypatch):
    used = []
    for name in ("row_stats", "softmax_gradient_"):
        original = getattr(cuda_kernels, name)
        monkeypatch.setattr(cuda_kernels, name, lambda *a, _f=original, _n=name, **k: (used.append(_n), _f(*a, **k))[1])
    logits = fresh(4, 1000, torch.float32).requires_grad_()
    rows = Segments.from_offsets(np.array([0, 2, 4, 6, 8]), "cuda")
    sampled, ids = torch.arange(4, device="cuda"), torch.arange(8, device="cuda")
    found = logprobs.support_logits(logits, sampled, ids, rows)
    assert found.lse is not None
    found.lse.sum().backward()
    assert used == ["row_stats", "softmax_gradient_"]
