"""The Triton kernels against float64 on the host: fresh random inputs, poisoned outputs, real vocabularies."""

import math

import numpy as np
import pytest
import torch

from miles_ext import cuda_kernels, fused
from miles_ext.cuda_kernels import GRADIENT, SCAN, Launch
from miles_ext.logprobs import VocabShard
from miles_ext.score_centering import EstimatorConfig, SupportTensors, score_centered_loss
from tests.miles_ext.estimator_cases import arrays_of

pytestmark = pytest.mark.cuda
VOCABULARIES = (151_936, 248_320)
COMPLETE = (1, 4096, 17, 2, 1000, 33, 4095, 64)
LN_2 = math.log(2)


def fresh(n: int, v: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(n, v, device="cuda") * 4 + 10 * torch.randn(n, 1, device="cuda")).to(dtype)


def scan(logits, temperature=1.0, first_id=0, ids=None, launch=SCAN):
    n, v = logits.shape
    ids = torch.stack([torch.randperm(v, device="cuda")[: min(5, v)] for _ in range(n)]) if ids is None else ids
    offsets = torch.arange(n + 1, device="cuda") * ids.shape[1]
    return ids, cuda_kernels.scan(
        logits, ids[:, 0].contiguous(), ids.flatten(), offsets, temperature, v, first_id=first_id,
        normalise=True, entropy=True, widest=ids.shape[1], launch=launch,
    )  # fmt: skip


def sums(stats):
    """lse and entropy of the whole from the splits' sums, in float64."""
    top, total, moment = stats.double().cpu()
    highest = top.amax(1)
    shift = (top - highest[:, None]).clamp_min(-1e4)
    total, moment = (shift.exp2() * total).sum(1), (shift.exp2() * (moment + shift * total)).sum(1)
    return (highest + total.log2()) * LN_2, total.log() - moment / total * LN_2


@pytest.mark.parametrize("launch", [SCAN, Launch(1024, 4, programs=1 << 16), Launch(4096, 8, programs=1)])
@pytest.mark.parametrize("v", [*VOCABULARIES, 1, 7, 8192, 8193])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_one_pass_gives_sums_and_recorded_logits(v, dtype, temperature, launch):
    logits = fresh(13, v, dtype)
    ids, (stats, gathered) = scan(logits, temperature, launch=launch)
    z = logits.double().cpu() / temperature
    p = z.softmax(-1)
    lse, entropy = sums(stats)
    torch.testing.assert_close(lse, z.logsumexp(-1), rtol=3e-7, atol=3e-6)
    torch.testing.assert_close(entropy, -torch.xlogy(p, p).sum(-1), rtol=2e-5, atol=2e-5)
    expected = logits.gather(1, ids).float()
    assert torch.equal(gathered[:13], expected[:, 0]) and torch.equal(gathered[13:], expected.flatten())


def test_a_shard_gathers_its_own_columns_and_zeros():
    logits = fresh(6, 1000, torch.bfloat16)
    ids = torch.randint(3000, (6, 40), device="cuda")
    _, (_, gathered) = scan(logits, first_id=1000, ids=ids, launch=Launch(256, 4, programs=64))
    own = (ids >= 1000) & (ids < 2000)
    expected = torch.where(own, logits.float().gather(1, (ids - 1000).clamp(0, 999)), 0.0)
    assert torch.equal(gathered[6:], expected.flatten()) and torch.equal(gathered[:6], expected[:, 0])


def test_shards_of_nothing_and_non_finite_rows():
    logits = torch.full((4, 1000), -torch.inf, device="cuda")
    logits[1, 3] = 0.0
    logits[2] = float("nan")
    logits[3, 5] = torch.inf
    stats = scan(logits)[1][0]
    lse, _ = sums(stats)
    assert (stats[1, 0] == 0).all() and lse[1] == 0
    assert not lse[2].isfinite() and not lse[3].isfinite()


@pytest.mark.parametrize("launch", [GRADIENT, Launch(1024, 4, programs=1 << 16), Launch(4096, 8, programs=1)])
@pytest.mark.parametrize("v", [*VOCABULARIES, 1, 7, 4097])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_writes_every_element_and_nothing_else(v, dtype, launch):
    n, pad, k = 9, 5, min(v, 100)
    logits = fresh(n, v + pad, dtype)[:, :v]  # a row stride that is not the width
    heat = torch.rand(n, device="cuda") + 0.5
    z = logits.double() / heat[:, None].double()
    pull, upstream, at_y = torch.randn(3, n, device="cuda").unbind()
    entries = torch.randn(n, k, device="cuda")
    ids = torch.stack([torch.randperm(v, device="cuda")[:k] for _ in range(n)])
    sampled = ids[:, k // 2].clone()
    room = torch.full((n + 1, v + pad), float("nan"), dtype=dtype, device="cuda")
    out = room[:n, :v]
    cuda_kernels.gradient(
        out, logits, heat, torch.stack([(z.logsumexp(-1) / LN_2).float(), pull, at_y]), entries.flatten(), upstream,
        sampled, ids.flatten(), torch.arange(n + 1, device="cuda") * k, v, first_id=0, normalise=True, widest=k,
        launch=launch,
    )  # fmt: skip
    expected = pull[:, None].double() * z.softmax(-1)
    expected.scatter_(1, ids, entries.double()).scatter_(1, sampled[:, None], at_y[:, None].double())
    expected *= upstream[:, None]
    tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=1e-12)
    assert room[:n, v:].isnan().all() and room[n].isnan().all()


@pytest.mark.parametrize("v", VOCABULARIES)
@pytest.mark.parametrize("mode", ["none", "tis", "mis"])
@pytest.mark.parametrize("shape", ["head32", "head128", "complete"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("consume", [False, True])
def test_estimator_on_the_device_equals_float64_on_the_host(v, mode, shape, dtype, consume):
    kind = "complete" if shape == "complete" else "head"
    lengths = COMPLETE if kind == "complete" else (int(shape.removeprefix("head")),) * 8
    z, arrays, advantages = arrays_of(v, lengths, kind, dtype)
    cfg = EstimatorConfig(mode=mode, centering="on", entropy=True)
    reference = z.clone().requires_grad_()
    loss, metrics = score_centered_loss(reference, SupportTensors.from_arrays(*arrays, kind), advantages, cfg, 0.7)
    loss.sum().backward()
    ids, lq, offsets, sampled, sampled_lq = arrays
    device_support = SupportTensors.from_arrays(
        ids, lq.astype(np.float32), offsets, sampled, sampled_lq.astype(np.float32), kind, device="cuda"
    )
    logits = z.to(dtype).cuda().requires_grad_()
    found, measured = score_centered_loss(
        logits, device_support, advantages.float().cuda(), cfg, 0.7, consume=consume
    )
    found.sum().backward()
    assert reference.grad is not None and logits.grad is not None
    assert (logits.grad.data_ptr() == logits.data_ptr()) == consume
    got = logits.grad.double().cpu()
    assert got.isfinite().all()
    error = (got - reference.grad).norm() / reference.grad.norm()
    assert error < (5e-3 if dtype == torch.bfloat16 else 2e-5), float(error)
    torch.testing.assert_close(found.double().cpu(), loss.detach(), rtol=2e-4, atol=2e-4)
    assert measured.keys() == metrics.keys()
    for name, value in metrics.items():
        torch.testing.assert_close(measured[name].double().cpu(), value, rtol=1e-3, atol=1e-4, msg=name)


def test_the_kernels_are_what_the_estimator_uses(monkeypatch):
    used = []
    for name in ("scan", "estimate", "gradient"):
        original = getattr(cuda_kernels, name)
        monkeypatch.setattr(cuda_kernels, name, lambda *a, _f=original, _n=name, **k: (used.append(_n), _f(*a, **k))[1])
    z, arrays, advantages = arrays_of(1000, (4,) * 3, "head", torch.float32)
    logits = z.float().cuda().requires_grad_()
    loss, _ = score_centered_loss(
        logits, SupportTensors.from_arrays(*arrays, "head", "cuda"), advantages.cuda(), EstimatorConfig()
    )
    loss.sum().backward()
    assert used == ["scan", "estimate", "gradient"] and fused.VocabShard is VocabShard
