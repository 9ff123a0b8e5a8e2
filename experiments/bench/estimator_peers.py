# pyright: reportMissingImports=false
"""Public kernels beside ours on the work that they can do: the log-probability of one token, on a GPU.

From logits: each token's own weight, as a policy gradient has; ours is the plain step (K = 0). From hidden states: the
plain sum over tokens, LM head and its gradient included. Peers that are not installed are named, never dropped.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore

from experiments.bench.device import Step, interleaved, nothing, peak_bytes, spread
from experiments.evidence import Row, report
from miles_ext.score_centering import EstimatorConfig, SupportTensors, score_centered_loss
from trainer.backends.scorer import head_loss

TOKENS, VOCAB, HIDDEN, CHUNK = 4096, 151_936, 2048, 1024
SAMPLE = 64  # rows whose gradient is compared with float64
PLAIN = EstimatorConfig(mode="none", centering="off")
LIGER, MEGATRON = "liger_kernel", "megatron.core"


def installed(package: str) -> bool:
    return importlib.util.find_spec(package.split(".")[0]) is not None


def rows(repeats: int) -> list[Row]:
    torch.manual_seed(23)
    found = compare("logits", *from_logits(), repeats)
    torch.cuda.empty_cache()
    return found + compare("linear", *from_hidden(), repeats)


def compare(work: str, steps: dict[str, Step], expected: Tensor, absent: list[str], repeats: int) -> list[Row]:
    """Median milliseconds of each step, in turn, with its peak memory and the error of its gradient."""
    errors, failed = {}, {name: "not installed" for name in absent}
    for name, step in steps.items():
        step.prepare()
        try:
            found = step.run()[0][:SAMPLE].double()
        except Exception as error:  # another project's code: what it raises here is its result
            failed[name] = f"failed: {type(error).__name__}: {str(error)[:300]}"
            continue
        errors[name] = float((found - expected).norm() / expected.norm())
    steps = {name: steps[name] for name in errors}
    peaks = {name: peak_bytes(step) for name, step in steps.items()}
    times = interleaved(steps, repeats)
    median = {name: statistics.median(found) for name, found in times.items()}
    size = f"{TOKENS} tokens, V={VOCAB}, bfloat16, {torch.cuda.get_device_name()}"
    present = [
        report(
            f"estimator/cuda_peer_{work}/{name}", median[name] * 1e3, "ms",
            f"range {spread([t * 1e3 for t in times[name]])}; {median[name] / median['ours']:.2f} of ours; peak "
            f"{peaks[name] / 2**30:.2f} GiB beyond the inputs; gradient within {errors[name]:.1e} of float64; {size}",
        )
        for name in steps
    ]  # fmt: skip
    return present + [report(f"estimator/cuda_peer_{work}/{name}", math.nan, "ms", why) for name, why in failed.items()]


def plain_support(sampled: Tensor) -> SupportTensors:
    return SupportTensors.from_arrays(
        np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(len(sampled) + 1, np.int64), sampled.cpu().numpy(),
        np.zeros(len(sampled), np.float32), "head", "cuda",
    )  # fmt: skip


def from_logits() -> tuple[dict[str, Step], Tensor, list[str]]:
    original = torch.randn(TOKENS, VOCAB, device="cuda", dtype=torch.bfloat16) * 3
    logits = original.clone().requires_grad_()
    target = torch.randint(VOCAB, (TOKENS,), device="cuda")
    weights, support = torch.randn(TOKENS, device="cuda"), plain_support(target)

    def step(loss: Callable[[], Tensor], *, consumes: bool = False) -> Step:
        restore = partial(logits.data.copy_, original)
        return Step(lambda: torch.autograd.grad((loss() * weights).sum(), logits), restore if consumes else nothing)

    def ours(*, consume: bool) -> Tensor:
        return score_centered_loss(logits, support, torch.ones_like(weights), PLAIN, consume=consume)[0]

    steps = {
        "ours": step(lambda: ours(consume=False)),
        "ours_consuming": step(lambda: ours(consume=True), consumes=True),
        "torch_bfloat16": step(lambda: F.cross_entropy(logits, target, reduction="none")),
        "torch_float32": step(lambda: F.cross_entropy(logits.float(), target, reduction="none")),
    }
    absent = [name for name, package in (("liger", LIGER), ("megatron", MEGATRON)) if not installed(package)]
    if installed(LIGER):
        from liger_kernel.transformers.functional import liger_cross_entropy

        # Writes its gradient into the logits, already in the forward pass.
        steps["liger"] = step(lambda: liger_cross_entropy(logits, target, reduction="none"), consumes=True)
    if installed(MEGATRON):
        from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

        group = one_rank_group()
        steps["megatron"] = step(
            lambda: fused_vocab_parallel_cross_entropy(logits[:, None], target[:, None], group)[:, 0]
        )

    p = original[:SAMPLE].double().softmax(-1)
    p[torch.arange(SAMPLE), target[:SAMPLE]] -= 1
    return steps, p * weights[:SAMPLE, None].double(), absent


def one_rank_group() -> dist.ProcessGroup:
    if not dist.is_initialized():
        store = FileStore(str(Path(tempfile.mkdtemp()) / "store"), 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    return group


def from_hidden() -> tuple[dict[str, Step], Tensor, list[str]]:
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

    def naive() -> Tensor:
        return F.cross_entropy((hidden @ weight.t()).float(), target, reduction="sum")

    steps = {
        "ours": step(lambda: head_loss(hidden, head, list(head.parameters()), CHUNK, loss_fn)[0]),
        "ours_whole": step(lambda: score_centered_loss(head(hidden), support, all_ones, PLAIN, consume=True)[0].sum()),
        "torch_float32": step(naive),
    }
    absent = []
    if hasattr(F, "linear_cross_entropy"):
        steps["torch_linear"] = step(lambda: F.linear_cross_entropy(hidden, weight, target, reduction="sum"))
    else:
        absent.append("torch_linear")
    if installed(LIGER):
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        steps["liger"] = step(lambda: liger_fused_linear_cross_entropy(hidden, weight, target, reduction="sum"))
    else:
        absent.append("liger")

    w = weight.detach().double()
    p = (hidden[:SAMPLE].detach().double() @ w.t()).softmax(-1)
    p[torch.arange(SAMPLE), target[:SAMPLE]] -= 1
    return steps, p @ w, absent
