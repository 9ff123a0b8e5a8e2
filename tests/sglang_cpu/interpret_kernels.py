"""Runs the packing kernels in Triton's interpreter and compares them with the torch version. A program of its own:
the interpreter must be chosen before Triton is imported. Prints the number of rows compared."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from miles_ext.law import law, sample
from miles_ext.sglang_plugin import pack_kernels, pack_torch

V = 5000  # more than one block of the kernel


def compare(name: str, probs: torch.Tensor, rows: list[int], sizes: list[int], shape: tuple[int, ...]) -> int:
    sampled = sample(probs, torch.rand(len(probs), dtype=torch.float64)).clamp_min(0)
    committed = torch.rand(len(probs)) < 0.8
    results = []
    for module in (pack_torch, pack_kernels):
        meta, entries = torch.zeros(len(rows), 3, dtype=torch.int32), torch.zeros(shape, dtype=torch.int32)
        getattr(module, name)(probs, sampled, committed, torch.tensor(rows), torch.tensor(sizes), meta, entries)
        results.append((meta, entries))
    (meta, entries), (meta_k, entries_k) = results
    assert torch.equal(meta[:, [0, 2]], meta_k[:, [0, 2]]), (meta, meta_k)
    # Entries of rows that are not OK carry no meaning, nor do those behind the last support.
    used = slice(int(meta[:, 0].sum())) if name == "pack_supports" else meta[:, 2] == 0
    entries, entries_k = (e[used].reshape(-1, 2) for e in (entries, entries_k))
    assert torch.equal(entries[:, 0], entries_k[:, 0])
    for mine, other in ((meta[:, 1], meta_k[:, 1]), (entries[:, 1], entries_k[:, 1])):
        mine, other = (t.contiguous().view(torch.float32) for t in (mine, other))
        assert torch.allclose(mine, other, rtol=1e-6, atol=1e-6, equal_nan=True)
    return len(rows)


torch.manual_seed(0)
logits = torch.randn(8, V) * 3
logits[2, 7] = torch.nan
filtered = law(logits, [1.0] * 4 + [0.5] * 4, [50, 0, 5, 1, 0, 50, 3, 900], [1.0, 0.9, 0.5, 1, 0.95, 0.8, 1, 1])
count = compare("pack_supports", filtered, list(range(8)), [V] * 8, (8 * V, 2))
count += compare("pack_supports", filtered, [1, 4, 7], [V, 10, 899], (3 * V, 2))  # rows that overflow their request
count += compare("pack_supports", filtered, list(range(8)), [V] * 8, (300, 2))  # rows that do not fit in the step
count += compare("pack_heads", law(logits), [0, 1, 3, 6], [32, 20, 32, 1], (4, 32, 2))
count += compare("pack_heads", law(logits), list(range(8)), [7] * 8, (8, 7, 2))
print(count)
