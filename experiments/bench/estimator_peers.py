# pyright: reportMissingImports=false
"""Public kernels beside ours on the work that they can do: the log-probability of one token, on a GPU.

From logits: each token's own weight, as a policy gradient has; ours is the plain step (K = 0). From hidden states: the
plain sum over tokens, LM head and its gradient included. A peer that is absent or raises is named, with what it said.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore

from experiments.bench.device import Step, interleaved, peak_bytes, spread
from experiments.evidence import Row, guarded, not_measured, report
from miles_ext.lm_head import head_loss
from miles_ext.score_centering import EstimatorConfig, SupportTensors, score_centered_loss

TOKENS, VOCAB, HIDDEN, CHUNK = 4096, 151_936, 2048, 1024
SAMPLE = 64  # rows whose gradient is compared with float64
PLAIN = EstimatorConfig(mode="none", centering="off")


def rows(repeats: int) -> Iterator[Row]:
    torch.manual_seed(23)
    for work, arms in (("logits", from_logits), ("linear", from_hidden)):
        yield from guarded(f"estimator/cuda_peer_{work}", lambda work=work, arms=arms: compare(work, *arms(), repeats))
        torch.cuda.empty_cache()


def runnable(steps: dict[str, Step], expected: Tensor) -> tuple[dict[str, float], dict[str, str]]:
    """Relative error of each step's gradient; what the steps that cannot run say."""
    errors, failed = {}, {}
    for name, step in steps.items():
        try:
            step.prepare()
            found = step.run()[0][:SAMPLE].double()
            errors[name] = float((found - expected).norm() / expected.norm())
        except Exception as error:  # another project's code, absent or not: what it raises here is its result
            failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
    return errors, failed


def compare(work: str, steps: dict[str, Step], expected: Tensor, repeats: int) -> Iterator[Row]:
    """Median milliseconds of each step, in turn, with its peak memory and the error of its gradient."""
    errors, failed = runnable(steps, expected)
    for name, why in failed.items():
        yield not_measured(f"estimator/cuda_peer_{work}/{name}", why)
    steps = {name: steps[name] for name in errors}
    peaks = {name: peak_bytes(step) for name, step in steps.items()}
    times = interleaved(steps, repeats)
    median = {name: statistics.median(found) for name, found in times.items()}
    size = f"{TOKENS} tokens, V={VOCAB}, bfloat16, {torch.cuda.get_device_name()}"
    for name in steps:
        yield report(
            f"estimator/cuda_peer_{work}/{name}", median[name] * 1e3, "ms",
            f"range {spread([t * 1e3 for t in times[name]])}; {median[name] / median['ours']:.2f} of ours; peak "
            f"{peaks[name] / 2**30:.2f} GiB beyond the inputs; gradient within {errors[name]:.1e} of float64; {size}",
        )  # fmt: skip


def plain_support(sampled: Tensor) -> SupportTensors:
    return SupportTensors.from_arrays(
        np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(len(sampled) + 1, np.int64), sampled.cpu().numpy(),
        np.zeros(len(sampled), np.float32), "head", "cuda",
    )  # fmt: skip


def from_logits() -> tuple[dict[str, Step], Tensor]:
    original = torch.randn(TOKENS, VOCAB, device="cuda", dtype=torch.bfloat16) * 3
    logits = original.clone().requires_grad_()
    target = torch.randint(VOCAB, (TOKENS,), device="cuda")
    weights, support = torch.randn(TOKENS, device="cuda"), plain_support(target)

    def step(loss: Callable[[], Tensor]) -> Step:
        """On fresh logits: some steps, and the one before, write their gradient into them."""
        return Step(lambda: torch.autograd.grad((loss() * weights).sum(), logits), partial(logits.data.copy_, original))

    def ours(*, consume: bool) -> Tensor:
        return score_centered_loss(logits, support, torch.ones_like(weights), PLAIN, consume=consume)[0]

    def liger() -> Tensor:
        from liger_kernel.transformers.functional import liger_cross_entropy

        return liger_cross_entropy(logits, target, reduction="none")

    def megatron() -> Tensor:
        from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

        return fused_vocab_parallel_cross_entropy(logits[:, None], target[:, None], one_rank_group())[:, 0]

    steps = {
        "ours": step(lambda: ours(consume=False)),
        "ours_consuming": step(lambda: ours(consume=True)),
        "torch_bfloat16": step(lambda: F.cross_entropy(logits, target, reduction="none")),
        "torch_float32": step(lambda: F.cross_entropy(logits.float(), target, reduction="none")),
        "liger": step(liger),
        "megatron": step(megatron),
    }
    p = original[:SAMPLE].double().softmax(-1)
    p[torch.arange(SAMPLE), target[:SAMPLE]] -= 1
    return steps, p * weights[:SAMPLE, None].double()


def one_rank_group() -> dist.ProcessGroup:
    if not dist.is_initialized():
        store = FileStore(str(Path(tempfile.mkdtemp()) / "store"), 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    return group


def from_hidden() -> tuple[dict[str, Step], Tensor]:
    hidden = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16).requires_grad_()
    head = nn.Linear(HIDDEN, VOCAB, bias=False, device="cuda", dtype=torch.bfloat16)
    weight, target = head.weight, torch.randint(VOCAB, (TOKENS,), device="cuda")
    support, all_ones = plain_support(target), torch.ones(TOKENS, device="cuda")
    parts = {start: plain_support(target[start : start + CHUNK]) for start in range(0, TOKENS, CHUNK)}

    def step(loss: Callable[[], Tensor]) -> Step:
        return Step(lambda: torch.autograd.grad(loss(), (hidden, weight)))

    def loss_fn(logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        loss, _ = score_centered_loss(logits, parts[part.start], all_ones[:CHUNK], PLAIN, consume=True)
        return loss.sum(), loss.detach()

    def liger() -> Tensor:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        return liger_fused_linear_cross_entropy(hidden, weight, target, reduction="sum")

    def naive() -> Tensor:
        return F.cross_entropy((hidden @ weight.t()).float(), target, reduction="sum")

    steps = {
        "ours": step(lambda: head_loss(hidden, head, list(head.parameters()), CHUNK, loss_fn)[0]),
        "ours_whole": step(lambda: score_centered_loss(head(hidden), support, all_ones, PLAIN, consume=True)[0].sum()),
        "torch_float32": step(naive),
        "torch_linear": step(lambda: F.linear_cross_entropy(hidden, weight, target, reduction="sum")),
        "liger": step(liger),
    }
    w = weight.detach().double()
    p = (hidden[:SAMPLE].detach().double() @ w.t()).softmax(-1)
    p[torch.arange(SAMPLE), target[:SAMPLE]] -= 1
    return steps, p @ w
