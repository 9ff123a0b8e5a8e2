"""Runs the estimator's kernels in Triton's interpreter and compares them with float64 torch operations. A program of
its own: the interpreter must be chosen before Triton is imported. Prints the number of cases compared."""

import itertools
import os
from typing import Literal, get_args

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from miles_ext import cuda_kernels, fused
from miles_ext.score_centering import Centering, EstimatorConfig, Mode, SupportTensors, score_centered_loss
from tests.miles_ext.estimator_cases import arrays_of

V = 333  # several blocks of the small launches below, and a rest
LAUNCHES = (cuda_kernels.Launch(64, 4, programs=1), cuda_kernels.Launch(128, 4, programs=16))
Kind = Literal["complete", "head"]
SHAPES: dict[Kind, tuple[tuple[int, ...], ...]] = {
    "head": ((0,) * 4, (32,) * 4, (3, 40, 0, 100)),
    "complete": ((1, 300, 17, 0),),
}


def compare(
    mode: Mode, centering: Centering, kind: Kind, lengths: tuple[int, ...], launch: cuda_kernels.Launch
) -> None:
    cuda_kernels.SCAN = cuda_kernels.GRADIENT = launch
    z, arrays, advantages = arrays_of(V, lengths, kind, torch.float32)
    arrays[4][0] = -np.inf if centering == "diagnose" else arrays[4][0]  # a token without a recorded law
    temperature = torch.rand(len(z)) + 0.5 if launch is LAUNCHES[1] else 0.7
    cfg = EstimatorConfig(mode, centering, entropy=True)
    upstream = torch.randn(len(z))
    reference, logits = z.clone().requires_grad_(), z.float().requires_grad_()
    loss, metrics = score_centered_loss(
        reference, SupportTensors.from_arrays(*arrays, kind), advantages, cfg,
        temperature.double() if isinstance(temperature, torch.Tensor) else temperature,
    )  # fmt: skip
    (loss * upstream).sum().backward()
    ids, lq, offsets, sampled, lq_y = arrays
    support = SupportTensors.from_arrays(
        ids, lq.astype(np.float32), offsets, sampled, lq_y.astype(np.float32), kind
    )
    found, measured = fused.fused_loss(
        logits, support, advantages.float(), cfg, temperature, None, consume=mode == "mis"
    )
    (found * upstream).sum().backward()
    torch.testing.assert_close(found.double(), loss, rtol=1e-3, atol=1e-4)  # a tail is a difference from one
    assert logits.grad is not None and reference.grad is not None
    torch.testing.assert_close(logits.grad.double(), reference.grad, rtol=1e-4, atol=1e-6)
    assert measured.keys() == metrics.keys()
    for name, value in metrics.items():
        torch.testing.assert_close(measured[name].double(), value, rtol=1e-3, atol=1e-4, msg=name)


torch.manual_seed(0)
count = 0
for mode, centering, launch in itertools.product(get_args(Mode), get_args(Centering), LAUNCHES):
    for kind, shapes in SHAPES.items():
        for lengths in shapes:
            compare(mode, centering, kind, lengths, launch)
            count += 1
print(count)
