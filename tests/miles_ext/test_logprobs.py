"""Fused support logits and their LM heads: values, gradients, chunks, padding and vocabulary shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from miles_ext import logprobs
from miles_ext.lm_head import head_loss, support_head
from miles_ext.logprobs import SupportLogits, VocabShard, support_logits
from miles_ext.score_centering import EstimatorConfig, SupportTensors, loss_from_support_logits, score_centered_loss
from miles_ext.segments import Segments

N, V, H = 7, 48, 10


def problem(ragged, dtype=torch.float64, seed=0):
    """hidden, weight, sampled, ids, rows; half of the sampled tokens lie in their support."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64)
    lengths = [3, 5, 0, 1, 4, 2, 6] if ragged else [4] * N
    ids = torch.cat([torch.randperm(V, generator=generator)[:length] for length in lengths])
    rows = Segments.from_offsets(np.concatenate([[0], np.cumsum(lengths)]))
    sampled = torch.randint(V, (N,), generator=generator)
    for i in range(0, N, 2):
        if lengths[i]:
            sampled[i] = ids[int(rows.host_offsets[i])]
    return hidden.to(dtype), weight.to(dtype), sampled, ids, rows


def trainable(*tensors):
    for tensor in tensors:
        tensor.requires_grad_()


def dense(z, sampled, ids, rows, temperature):
    """The same outputs from plain differentiable torch."""
    scaled = z / temperature
    lp = scaled.log_softmax(-1)
    return SupportLogits(
        scaled[torch.arange(len(z)), sampled], scaled[rows.index, ids], scaled.logsumexp(-1), -(lp.exp() * lp).sum(-1)
    )


def pull_back(outputs, inputs, seed=1):
    """Gradients of a random combination of the outputs."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=torch.float64)
    for output in outputs[:3]:
        if output is not None:
            total = total + (torch.randn(output.shape, generator=generator, dtype=torch.float64) * output).sum()
    return torch.autograd.grad(total, inputs)


def close(found, expected, tolerance=1e-12):
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None and a.numel():
            assert (a - b).abs().max() <= tolerance


@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.linspace(0.5, 2, N, dtype=torch.float64)[:, None]])
@pytest.mark.parametrize("ragged", [False, True])
def test_values_and_gradient(ragged, temperature):
    hidden, weight, sampled, ids, rows = problem(ragged)
    z = (hidden @ weight.t()).requires_grad_()
    per_token = temperature[:, 0] if isinstance(temperature, torch.Tensor) else temperature
    found = support_logits(z, sampled, ids, rows, per_token, entropy=True)
    expected = dense(z, sampled, ids, rows, temperature)
    close(found, expected)
    assert found.entropy is not None and not found.entropy.requires_grad
    close(pull_back(found, [z]), pull_back(expected, [z]))


def test_chunks_of_rows_and_strided_logits_change_nothing(monkeypatch):
    hidden, weight, sampled, ids, rows = problem(True)
    wide = torch.cat([hidden @ weight.t(), torch.full((N, 5), 1e3)], -1).requires_grad_()
    z = wide[:, :V]
    for chunk_bytes in (1, 3 * V * 8, 1 << 20):
        monkeypatch.setattr(logprobs, "CPU_CHUNK_BYTES", chunk_bytes)
        expected = dense(z, sampled, ids, rows, 0.7)
        found = support_logits(z, sampled, ids, rows, 0.7, entropy=True)
        close(found, expected)
        close(pull_back(found, [wide]), pull_back(expected, [wide]))


def test_padded_vocabulary_gets_no_mass_and_no_gradient():
    hidden, weight, sampled, ids, rows = problem(False)
    z = torch.cat([hidden @ weight.t(), torch.full((N, 5), 50.0)], -1).requires_grad_()
    found = support_logits(z, sampled, ids, rows, 0.7, shard=VocabShard(real_vocab=V))
    real = z[:, :V].detach().requires_grad_()
    expected = support_logits(real, sampled, ids, rows, 0.7)
    close(found, expected)
    (grad,) = pull_back(found, [z])
    assert (grad[:, V:] == 0).all()
    close([grad[:, :V]], pull_back(expected, [real]))


def test_without_normalisation_the_vocabulary_is_not_read():
    hidden, weight, sampled, ids, rows = problem(True)
    z = hidden @ weight.t()
    touched = torch.zeros_like(z, dtype=torch.bool)
    touched[rows.index, ids] = True
    touched[torch.arange(N), sampled] = True
    z = torch.where(touched, z, torch.nan).requires_grad_()
    found = support_logits(z, sampled, ids, rows, normalise=False)
    assert found.lse is None and found.entropy is None
    (grad,) = pull_back(found, [z])
    assert grad.isfinite().all() and (grad[~touched] == 0).all() and (grad[touched] != 0).all()
    with pytest.raises(ValueError, match="normalise"):
        support_logits(z, sampled, ids, rows, normalise=False, entropy=True)


def test_forbidden_and_broken_logits():
    z = torch.tensor([[0.0, 1.0, -torch.inf], [0.0, torch.nan, 1.0], [-torch.inf] * 3], requires_grad=True)
    rows = Segments.from_offsets(np.arange(4))
    found = support_logits(z, torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64), rows, entropy=True)
    assert found.lse is not None and found.entropy is not None
    assert found.lse[0].item() == pytest.approx(float(np.log(1 + np.e)))
    likely = np.e / (1 + np.e)
    assert found.entropy[0].item() == pytest.approx(-likely * np.log(likely) - (1 - likely) * np.log(1 - likely))
    assert found.lse[1].isnan() and found.lse[2] == -torch.inf
    (grad,) = torch.autograd.grad(found.lse[:1].sum(), [z])
    assert grad[0, 2] == 0 and grad[0].isfinite().all()


def test_ids_outside_the_vocabulary_are_refused():
    z, rows = torch.zeros(1, 4), Segments.from_offsets(np.array([0, 1]))
    with pytest.raises(IndexError):
        support_logits(z, torch.tensor([0]), torch.tensor([9]), rows)


@pytest.mark.parametrize("offset", [0.0, 40.0])
def test_float32_accuracy_at_a_real_vocabulary(offset):
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(3, 151_936, generator=generator) * 3 + offset
    ids, rows = z.topk(128).indices.reshape(-1), Segments.from_offsets(np.arange(4) * 128)
    sampled = torch.tensor([5, 6, 7])
    single, double = z.clone().requires_grad_(), z.double().requires_grad_()
    found, exact = (support_logits(t, sampled, ids, rows, 0.7) for t in (single, double))
    assert found.lse is not None and exact.lse is not None
    # Two roundings of the largest number in play, logit / temperature.
    assert (found.lse - exact.lse).abs().max() <= 2**-23 * float(z.abs().max()) / 0.7
    (grad,) = torch.autograd.grad((found.sampled - found.lse).sum(), [single])
    (exact_grad,) = torch.autograd.grad((exact.sampled - exact.lse).sum(), [double])
    assert (grad - exact_grad).abs().sum(-1).max() <= 1e-5


def chunked(hidden, weight, sampled, ids, rows, chunk, shard=None, kept=None):
    """`head_loss` of a combination of the outputs that depends on the row, and its metric sums."""
    combination = torch.linspace(-1, 2, len(sampled), dtype=torch.float64)

    def loss_fn(logits, part):
        entries, layout = rows.part(part.start, part.stop)
        found = support_logits(logits, sampled[part], ids[entries], layout, 0.7, shard=shard)
        assert found.lse is not None
        if kept is not None:
            kept.append(len(logits))
        loss = (combination[part] * (found.lse - found.sampled)).sum() + found.support.square().sum()
        return loss, torch.stack([loss.detach(), found.lse.detach().sum()])

    return head_loss(hidden, lambda part: part @ weight.t(), [weight], chunk, loss_fn)


@pytest.mark.parametrize("chunk", [1, 3, N])
@pytest.mark.parametrize("ragged", [False, True])
def test_a_chunked_head_equals_dense(ragged, chunk):
    hidden, weight, sampled, ids, rows = problem(ragged)
    trainable(hidden, weight)
    kept = []
    loss, sums = chunked(hidden, weight, sampled, ids, rows, chunk, kept=kept)
    assert max(kept) <= chunk and sum(kept) == N
    found = dense(hidden @ weight.t(), sampled, ids, rows, 0.7)
    assert found.lse is not None
    combination = torch.linspace(-1, 2, N, dtype=torch.float64)
    expected = (combination * (found.lse - found.sampled)).sum() + found.support.square().sum()
    assert sums is not None
    close([loss, sums[0], sums[1]], [expected, expected, found.lse.sum()], 1e-11)
    close(torch.autograd.grad(2 * loss, [hidden, weight]), torch.autograd.grad(2 * expected, [hidden, weight]), 1e-11)


def test_a_chunked_head_keeps_no_logits():
    hidden, weight, sampled, ids, rows = problem(False)
    trainable(hidden, weight)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss, _ = chunked(hidden, weight, sampled, ids, rows, 2)
    assert loss.requires_grad and max(t.numel() for t in kept) == weight.numel()
    assert not any(t.numel() == N * V for t in kept)


def test_a_chunked_head_in_bfloat16_adds_chunks_up_in_float32():
    hidden, weight, *_ = problem(False, torch.bfloat16)
    hidden = hidden.repeat(64, 1)
    scale = torch.linspace(0.5, 1.5, len(hidden))

    def loss_fn(logits, part):
        loss = (scale[part, None] * logits.float()[:, :3]).sum()
        return loss, loss.detach()[None]

    trainable(hidden, weight)
    loss, _ = head_loss(hidden, lambda part: part @ weight.t(), [weight], 1, loss_fn)
    found = torch.autograd.grad(loss, weight)[0][0].double()
    # Each chunk's own gradient is rounded once, and so is their sum.
    exact = (scale.to(torch.bfloat16)[:, None].double() * hidden.detach().double()).sum(0)
    assert (found - exact).abs().max() <= 2**-8 * exact.abs().max()


@pytest.mark.parametrize("chunk", [1, 5, 4096])
@pytest.mark.parametrize("ragged", [False, True])
def test_support_head_equals_dense(ragged, chunk):
    hidden, weight, sampled, ids, rows = problem(ragged)
    trainable(hidden, weight)
    found = support_head(hidden, weight, sampled, ids, rows, 0.7, chunk=chunk)
    expected = dense(hidden @ weight.t(), sampled, ids, rows, 0.7)._replace(lse=None, entropy=None)
    close(found, expected)
    close(pull_back(found, [hidden, weight]), pull_back(expected, [hidden, weight]))


def test_the_support_head_in_bfloat16_accumulates_in_float32():
    hidden, weight, sampled, ids, rows = problem(False, torch.bfloat16)
    trainable(hidden, weight)
    found = support_head(hidden, weight, sampled, ids, rows, chunk=2)
    exact_inputs = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected = dense(exact_inputs[0] @ exact_inputs[1].t(), sampled, ids, rows, 1.0)
    assert found.support.dtype == torch.float32
    assert (found.support - expected.support).abs().max() <= 1e-6 * expected.support.abs().max()
    grads = pull_back([found.sampled, found.support, None], [hidden, weight])
    exact = pull_back([expected.sampled, expected.support, None], exact_inputs)
    for a, b in zip(grads, exact, strict=True):
        assert a.dtype == torch.bfloat16 and (a - b).abs().max() <= 2**-8 * b.abs().max()


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_input_of_the_support_head_gets_no_gradient(frozen):
    hidden, weight, sampled, ids, rows = problem(True)
    inputs = [hidden, weight]
    inputs[1 - frozen].requires_grad_()
    found = support_head(hidden, weight, sampled, ids, rows)
    (grad,) = pull_back(found, [inputs[1 - frozen]])
    assert grad.abs().max() > 0 and inputs[frozen].grad is None


def test_the_loss_does_not_know_that_a_support_head_made_its_logits():
    hidden, weight, sampled, ids, rows = problem(False)
    trainable(hidden, weight)
    z = (hidden @ weight.t()).detach()
    ids = z.topk(4).indices.reshape(-1)
    q = torch.softmax(z, -1).gather(1, ids.view(N, 4))
    q = q / q.sum(-1, keepdim=True)
    support = SupportTensors(ids, q.log().view(-1), rows, ids.view(N, 4)[:, 1], q[:, 1].log(), "complete")
    advantages, cfg = torch.linspace(-1, 1, N, dtype=torch.float64), EstimatorConfig("tis", tis_clip=1.05)
    expected, _ = score_centered_loss(hidden @ weight.t(), support, advantages, cfg, 0.8)
    at = support_head(hidden, weight, support.sampled, ids, rows, 0.8)
    found, _ = loss_from_support_logits(at, support, advantages, cfg, 0.8)
    close([found], [expected])
    close(torch.autograd.grad(found.sum(), [hidden, weight]), torch.autograd.grad(expected.sum(), [hidden, weight]))


PADDED = V + 6  # 27 columns a rank: the last six of rank 1 are padding


def scanned(z):
    """What a GPU's pass leaves for scaled logits [n, v]: base-2 maximum, sum and moment of three splits of a row."""
    x = [part * np.log2(np.e) for part in z.tensor_split(3, -1)]
    top = torch.stack([part.amax(-1) for part in x], -1)
    shifted = [part - top[:, i, None] for i, part in enumerate(x)]
    total = torch.stack([part.exp2().sum(-1) for part in shifted], -1)
    return torch.stack([top, total, torch.stack([(part * part.exp2()).sum(-1) for part in shifted], -1)])


def _shard_worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    calls: list[str] = []
    all_reduce = dist.all_reduce

    def counted(tensor, op=dist.ReduceOp.SUM, group=None):
        calls.append(str(op).split(".")[-1])
        return all_reduce(tensor, op, group=group)

    dist.all_reduce = counted
    results = {}
    everyone = dist.group.WORLD
    assert everyone is not None
    for ragged in (False, True):
        hidden, weight, sampled, ids, rows = problem(ragged)
        weight = torch.cat([weight, torch.full((PADDED - V, H), 3.0, dtype=torch.float64)])
        own = weight[rank * PADDED // 2 : (rank + 1) * PADDED // 2].clone().requires_grad_()
        shard = VocabShard(everyone, rank * PADDED // 2, V)
        for name in ("logits", "sparse", "support"):
            calls.clear()
            hidden = hidden.detach().requires_grad_()
            z = (hidden @ own.t()).detach().requires_grad_()
            inputs = [hidden, own] if name == "support" else [z]
            if name == "logits":
                found = support_logits(z, sampled, ids, rows, 0.7, shard=shard, entropy=True)
            elif name == "sparse":
                found = support_logits(z, sampled, ids, rows, 0.7, shard=shard, normalise=False)
            else:
                found = support_head(hidden, own, sampled, ids, rows, 0.7, shard=shard, chunk=3)
            forward = list(calls)
            grads = pull_back(found, inputs)
            results[name, ragged] = ([None if t is None else t.detach() for t in found], grads, forward, len(calls))
        z = (hidden @ own.t()).detach()[:, : shard.columns(len(own))] / 0.7
        calls.clear()
        gathered = torch.full((5,), float(rank + 1), dtype=torch.float64)
        results["splits", ragged] = (
            *logprobs.reduce_over(everyone, scanned(z), gathered, entropy=True),
            list(calls),
        )
        calls.clear()
        loss, _ = chunked(hidden, own, sampled, ids, rows, 3, shard)
        forward = list(calls)
        results["chunked", ragged] = (
            loss.detach(), torch.autograd.grad(loss, [hidden, own]), forward, len(calls)
        )  # fmt: skip
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> list[dict]:
    """Results of two gloo processes, each with half of a padded vocabulary."""
    folder = tmp_path_factory.mktemp("shards")
    spawn(_shard_worker, (str(folder),), nprocs=2)
    return [torch.load(Path(folder) / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("name", ["logits", "sparse", "support"])
def test_two_vocabulary_shards_equal_one_process(sharded, name, ragged):
    hidden, weight, sampled, ids, rows = problem(ragged)
    trainable(hidden, weight)
    z = hidden @ weight.t()
    if name in ("logits", "sparse"):
        z = z.detach().requires_grad_()
    expected = dense(z, sampled, ids, rows, 0.7)
    if name in ("sparse", "support"):
        expected = expected._replace(lse=None, entropy=None)
    for outputs, _, forward, in_all in (rank[name, ragged] for rank in sharded):
        close(outputs, expected)
        assert forward == (["SUM"] if name in ("sparse", "support") else ["MAX", "SUM"])
        assert in_all == len(forward), "backward must not communicate"
    (_, left, *_), (_, right, *_) = (rank[name, ragged] for rank in sharded)
    if name in ("logits", "sparse"):
        whole = torch.cat([left[0], right[0]], -1)
        assert (whole[:, V:] == 0).all()
        close([whole[:, :V]], pull_back(expected, [z]))
    else:
        whole = torch.cat([left[1], right[1]])
        assert (whole[V:] == 0).all()
        # Each rank has its share of the hidden gradient; the caller's column-parallel region sums them.
        close([left[0] + right[0], whole[:V]], pull_back(expected, [hidden, weight]))


@pytest.mark.parametrize("ragged", [False, True])
def test_splits_on_two_ranks_add_up_to_the_whole_vocabulary(sharded, ragged):
    hidden, weight, sampled, ids, rows = problem(ragged)
    expected = dense(hidden @ weight.t(), sampled, ids, rows, 0.7)
    for stats, gathered, calls in (rank["splits", ragged] for rank in sharded):
        top, total, moment = stats[:, :, 0]
        lse = (top + total.log2()) * np.log(2)
        close([lse, (total.log2() - moment / total) * np.log(2)], [expected.lse, expected.entropy])
        assert stats.shape == (3, N, 1) and (gathered == 3).all() and calls == ["MAX", "SUM"]


@pytest.mark.parametrize("ragged", [False, True])
def test_two_shards_of_a_chunked_head_equal_one_process(sharded, ragged):
    hidden, weight, sampled, ids, rows = problem(ragged)
    trainable(hidden, weight)
    expected, _ = chunked(hidden, weight, sampled, ids, rows, N)
    of_hidden, of_weight = torch.autograd.grad(expected, [hidden, weight])
    left, right = (rank["chunked", ragged] for rank in sharded)
    for loss, _, forward, in_all in (left, right):
        close([loss], [expected], 1e-11)
        assert forward == ["MAX", "SUM"] * 3 and in_all == len(forward), "three chunks; nothing in backward"
    whole = torch.cat([left[1][1], right[1][1]])
    assert (whole[V:] == 0).all()
    close([left[1][0] + right[1][0], whole[:V]], [of_hidden, of_weight], 1e-11)


def test_segments_reduce_equal_and_unequal_rows_alike():
    x = torch.randn(12, dtype=torch.float64)
    equal, unequal = Segments.from_offsets(np.arange(0, 13, 4)), Segments.from_offsets(np.array([0, 4, 4, 8, 12]))
    assert equal.width == 4 and unequal.width is None
    assert torch.allclose(unequal.sum(x)[[0, 2, 3]], equal.sum(equal.fold(x)), atol=1e-15)
    assert torch.allclose(unequal.logsumexp(x)[[0, 2, 3]], equal.logsumexp(equal.fold(x)), atol=1e-15)
    assert unequal.sum(x)[1] == 0 and unequal.logsumexp(x)[1] == -torch.inf
    entries, part = unequal.part(1, 3)
    assert (entries.start, entries.stop) == (4, 8) and part.host_offsets.tolist() == [0, 0, 4]
    assert torch.equal(part.sum(x[entries]), unequal.sum(x)[1:3])
    assert unequal.spread(torch.arange(4)).tolist() == [0] * 4 + [2] * 4 + [3] * 4
