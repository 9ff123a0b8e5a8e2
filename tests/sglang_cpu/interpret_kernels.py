"""Runs the Triton kernels of law, draw and packing, compares them with the torch versions, and prints a count a line.

A program of its own: with TRITON_INTERPRET=1 they run in Triton's interpreter, without it on the GPU.
"""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_ext import law_kernels
from miles_ext.law import Filters, filtered_law, law, sample
from miles_ext.sglang_plugin import pack_kernels, pack_torch
from miles_ext.sglang_plugin.pack import UNCOMMITTED

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
V = 5008  # more than one block of the kernels
CASES = json.loads((Path(__file__).parents[1] / "data" / "filters.json").read_text())["cases"]


def device_law(logits: Tensor, filters: Filters) -> Tensor:
    """What `filtered_law` launches for the rows that a filter touches; the others stay at 7."""
    probs = torch.full(logits.shape, 7.0, device=DEVICE)
    rows, heat, k, p, _ = filters.on(torch.device(DEVICE))
    law_kernels.filter_rows(logits.to(DEVICE), probs, rows, heat, k, p, filters.filter_order == "joint")
    return probs.cpu()


def compare_law(logits: Tensor, *asked: Any, tolerance: float = 2e-7) -> int:
    """Same support, same probabilities, untouched rows left alone."""
    filters = Filters.of(logits, *asked)
    wanted, found = filtered_law(logits, filters), device_law(logits, filters)
    touched = filters.on(torch.device(DEVICE)).rows.cpu()
    rest = torch.ones(len(logits), dtype=torch.bool).index_fill(0, touched, False)
    assert (found[rest] == 7.0).all()
    wanted, found = wanted[touched], found[touched]
    assert torch.equal(wanted.isnan(), found.isnan())
    assert torch.equal(wanted > 0, found > 0), ((wanted > 0).sum(1), (found > 0).sum(1))
    assert (wanted - found).nan_to_num().abs().max() <= tolerance, (wanted - found).abs().max()
    return len(touched)


def written_cases() -> int:
    """Every case of filters.json, as float32 and, where its logits survive the rounding, as bfloat16."""
    count = 0
    for case in CASES:
        logits = torch.tensor([case["logits"]] * 2, dtype=torch.float32)
        wanted = torch.zeros(logits.shape[1], dtype=torch.float64)
        wanted[torch.tensor(case["support"])] = torch.tensor(case["probs"], dtype=torch.float64)
        filters = Filters.of(logits, case["temperature"], case["top_k"], case["top_p"], case["filter_order"])
        if not len(filters.filtered):
            continue
        exact = torch.equal(logits.bfloat16().float(), logits)
        for given in (logits, logits.bfloat16()) if exact else (logits,):
            found = device_law(given, filters).double()
            assert ((found > 0) == (wanted > 0)).all(), case["name"]
            assert (found - wanted).abs().max() < 1e-6, case["name"]
            count += 1
    return count


def random_laws() -> int:
    """Mixed batches over more than a block: ties, bad rows, greedy rows, forbidden tokens, both orders."""
    generator = torch.Generator().manual_seed(0)
    count = 0
    heat = [1.0, 0.7, 1.3, 1.0, 0.0, 1.0, 0.5, 1.0, 1.0, 1.0]
    k = [50, 0, 5, 1, 3, 40, 0, 900, 0, 20]
    p = [1.0, 0.9, 0.5, 1.0, 0.9, 0.95, 0.3, 0.8, 1.0, 0.9]
    for order in ("top_k_first", "joint"):
        for scale in (0.5, 4.0):
            logits = torch.randn(10, V, generator=generator) * scale
            logits[:5] = (4 * logits[:5]).round() / 4
            logits[5, 7], logits[6, ::2], logits[7, 9] = torch.nan, -torch.inf, torch.inf
            logits[9] = -torch.inf
            logits[9, :7] = 0.0
            count += compare_law(logits, heat, k, p, order)
            count += compare_law(logits[:5].bfloat16(), heat[:5], k[:5], p[:5], order)
    return count


def laws_found_by_bisecting() -> int:
    """Rows that no scratch holds: all tied, nuclei as wide as the vocabulary, a top-k beyond the reach."""
    generator = torch.Generator().manual_seed(1)
    count = 0
    for order in ("top_k_first", "joint"):
        logits = torch.randn(6, V, generator=generator) * 0.01
        logits[0], logits[1] = 2.5, torch.arange(V) % 2
        count += compare_law(logits, 1.0, [3, 3, 0, 4000, 4500, 0], [0.5, 0.4, 0.999, 1.0, 0.99, 0.2], order)
    return count


def draws() -> int:
    """Evenly spread uniforms hit each token as often as its mass says, and none without mass."""
    n, count = 400, 0
    for top_k in (0, 3, 40):
        probs = law(torch.randn(1, V, generator=torch.Generator().manual_seed(top_k)) * 4, top_k=top_k).expand(n, -1)
        uniforms = (torch.arange(n, dtype=torch.float64) + 0.5) / n
        ids = torch.empty(n, dtype=torch.int32, device=DEVICE)
        law_kernels.draw_rows(probs.to(DEVICE).contiguous(), uniforms.to(DEVICE), ids)
        assert torch.equal(ids.cpu().long(), sample(probs, uniforms))
        count += n
    edges = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0], [torch.nan] * 5], device=DEVICE)
    for uniform, wanted in ((0.0, [1, 2, 0]), (np.nextafter(1.0, 0.0), [3, 2, 0])):
        ids = torch.empty(3, dtype=torch.int32, device=DEVICE)
        law_kernels.draw_rows(edges, torch.full((3,), uniform, dtype=torch.float64, device=DEVICE), ids)
        assert ids.tolist() == wanted
    return count


def bonuses() -> int:
    """A bonus without mass becomes the likeliest token of its position, the others stay."""
    probs = torch.zeros(6, V, device=DEVICE)
    probs[:, 4500], probs[:, 3], probs[1, 9] = 0.5, 0.25, 0.25
    for dtype in (torch.int64, torch.int32):
        bonus = torch.tensor([9, 9], device=DEVICE, dtype=dtype)
        law_kernels.mend_bonus(probs, torch.tensor([1, 0], device=DEVICE, dtype=torch.int32), bonus, 3)
        assert bonus.tolist() == [9, 4500]
    return 4


def compare_rows(
    name: str, probs: Tensor, committed: Tensor | None, rows: list[int], sizes: list[int], *shapes: tuple[int, ...]
) -> int:
    """Meta and entries as torch writes them. shapes: of entries, and of what lies beyond."""
    sampled = sample(probs, torch.rand(len(probs), dtype=torch.float64)).clamp_min(0)
    results = []
    for module, device in ((pack_torch, "cpu"), (pack_kernels, DEVICE)):
        meta = torch.full((len(rows), 3), -7, dtype=torch.int32, device=device)
        places = [torch.full(shape, -7, dtype=torch.int32, device=device) for shape in shapes]
        given = (probs, sampled, committed, torch.tensor(rows), torch.tensor(sizes))
        getattr(module, name)(*(t if t is None else t.to(device) for t in given), meta, *places)
        results.append((meta.cpu(), torch.cat([place.cpu() for place in places], 1)))
    (meta, entries), (meta_k, entries_k) = results
    assert torch.equal(meta[:, [0, 2]], meta_k[:, [0, 2]]), (meta, meta_k)
    held = meta[:, 2] != UNCOMMITTED
    close(meta[held, 1], meta_k[held, 1])
    for i, length in enumerate(meta[:, 0].tolist()):
        if name == "pack_heads":  # equal probabilities may come in any order, and the last places go to any of them
            mine, other = entries[i, :length, 1], entries_k[i, :length, 1]
            logs = probs[rows[i]].clamp_min(torch.finfo(torch.float32).tiny).log()
            close(logs[entries_k[i, :length, 0].long()].view(torch.int32), other)
            assert len(set(entries_k[i, :length, 0].tolist())) == length
        else:
            assert torch.equal(entries[i, :length, 0], entries_k[i, :length, 0])
            mine, other = entries[i, :length, 1], entries_k[i, :length, 1]
        close(mine, other)
    return len(rows)


def close(mine: Tensor, other: Tensor) -> None:
    mine, other = (t.contiguous().view(torch.float32) for t in (mine, other))
    assert torch.allclose(mine, other, rtol=1e-6, atol=1e-6, equal_nan=True), (mine, other)


def packed_rows() -> int:
    torch.manual_seed(0)
    logits = torch.randn(8, V) * 3
    logits[2, 7] = torch.nan
    filtered = law(logits, [1.0] * 4 + [0.5] * 4, [50, 0, 5, 1, 0, 50, 3, 900], [1.0, 0.9, 0.5, 1, 0.95, 0.8, 1, 1])
    committed, every, deep = torch.tensor([2, 1, 0, 2]), list(range(8)), (V - 60, 2)
    supports, heads = partial(compare_rows, "pack_supports", filtered), partial(compare_rows, "pack_heads")
    count = supports(committed, every, [V] * 8, (8, 60, 2), (8, *deep))
    count += supports(None, [1, 4, 7], [V, 10, 899], (3, 60, 2), (3, *deep))  # overflow
    count += compare_rows(
        "pack_supports", filtered, None, every, [V] * 8, (8, 60, 2), (8, 40, 2)
    )  # no room in the step
    count += compare_rows(
        "pack_heads", law(logits), torch.tensor([1, 2, 2, 2]), [0, 1, 3, 6], [32, 20, 32, 1], (4, 32, 2)
    )
    count += heads(law(logits), None, every, [7] * 8, (8, 7, 2))
    tied = law(torch.cat([(logits[:2] * 2).round() / 4, torch.zeros(1, V), logits[:1] * 60]))
    count += heads(tied, None, [0, 1, 2, 3], [128] * 4, (4, 128, 2))
    count += heads(law(logits), None, [1], [pack_kernels.LARGEST_HEAD + 1], (1, 1025, 2))
    return count


for part in (written_cases, random_laws, laws_found_by_bisecting, draws, bonuses, packed_rows):
    print(part.__name__, part(), flush=True)
