"""One of the two processes of test_ranks.py: `python ranks.py SOURCE STORE RANK`."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

import stand_ins  # noqa: E402

from miles_ext.miles_adapter.samples import ATTRIBUTE  # noqa: E402
from miles_ext.sampling import SamplingSpec  # noqa: E402
from tests.miles.batches import VOCAB, Packed, arguments, packed, reference  # noqa: E402
from tests.miles.state import set_state  # noqa: E402

SPECS = (
    SamplingSpec(capture="head", head_size=6, temperature=0.7),
    SamplingSpec(capture="complete", top_k=4, temperature=0.7),
)
TOKENWISE = ("advantages", "rollout_log_probs")


def step(found: Packed, logits: torch.Tensor, spec: SamplingSpec, mode: str):
    from miles.backends.training_utils.loss import loss_function

    args = arguments(
        sc_mode=mode, rollout_temperature=spec.temperature, rollout_top_k=spec.top_k or -1, sc_head_size=spec.head_size
    )
    loss, _, log = loss_function(args, found.batch, 1, logits)
    loss.backward()
    assert logits.grad is not None
    return logits.grad, dict(zip(log["keys"], log["values"][1:].tolist(), strict=True))


def tensor_parallel(rank: int) -> None:
    """Each rank has half of a vocabulary that was padded from 20 to 24; together they have the whole gradient."""
    for spec in SPECS:
        for mode in ("none", "tis", "mis"):
            found = packed(spec)
            wide = torch.nn.functional.pad(found.logits.detach(), (0, 4), value=9.0)
            shard = wide[..., 12 * rank : 12 * rank + 12].clone().requires_grad_()
            grad, metrics = step(found, shard, spec, mode)
            both = [torch.empty_like(grad) for _ in range(2)]
            dist.all_gather(both, grad)
            whole = torch.cat(both, -1)[0].double()
            assert not whole[:, VOCAB:].any()
            gap = (whole[:, :VOCAB] - reference(found, spec, mode, "on") / 3).abs().max()
            assert gap <= 1e-6, (spec, mode, gap)
            same = [None, None]
            dist.all_gather_object(same, metrics)
            assert same[0] == same[1]
            print(f"tp 2, {spec.capture}, {mode}: {gap:.1e}")


def zigzag(length: int, rank: int) -> list[int]:
    """Positions of one sequence that a rank of two holds: its first and last but one quarter, padded. -1 is padding."""
    quarter = -(-length // 4)
    at = [*range(quarter * rank, quarter * (rank + 1)), *range(quarter * (3 - rank), quarter * (4 - rank))]
    return [one if one < length else -1 for one in at]


def context_parallel(rank: int) -> None:
    """Each rank has two of four pieces of every sequence, and the rows of its own tokens."""
    from miles.backends.training_utils.cp_utils import slice_log_prob_with_cp

    shapes = ((3, 5), (2, 9), (9, 1))  # of the last response, one rank scores no token
    for spec in SPECS:
        for mode in ("none", "tis"):
            found = packed(spec, shapes=shapes)
            wanted = reference(found, spec, mode, "on") / 3
            starts = torch.tensor([0, *found.batch["total_lengths"]]).cumsum(0).tolist()
            pieces, where = [], []
            for start, length in zip(starts, found.batch["total_lengths"], strict=False):
                at = zigzag(length, rank)
                where += [start + one if one >= 0 else -1 for one in at]
                blank = torch.zeros(VOCAB)
                pieces += [found.logits.detach()[0, start + one] if one >= 0 else blank for one in at]
            for name in TOKENWISE:
                found.batch[name] = [
                    slice_log_prob_with_cp(one, total, length)
                    for one, total, length in zip(
                        found.batch[name], found.batch["total_lengths"], found.batch["response_lengths"], strict=True
                    )
                ]
            logits = torch.stack(pieces)[None].requires_grad_()
            grad, metrics = step(found, logits, spec, mode)
            mine = torch.zeros_like(wanted)
            for row, position in enumerate(where):
                if position >= 0:
                    mine[position] = grad[0, row]
                else:
                    assert not grad[0, row].any()
            dist.all_reduce(mine)
            gap = (mine - wanted).abs().max()
            assert gap <= 1e-6, (spec, mode, gap)
            keys = [None, None]
            dist.all_gather_object(keys, list(metrics))
            assert keys[0] == keys[1]
            print(f"cp 2, {spec.capture}, {mode}: {gap:.1e}")
    # A rank without a single token of the micro-batch still takes part.
    found = packed(SPECS[0], shapes=((9, 1),))
    for name in TOKENWISE:
        found.batch[name] = [slice_log_prob_with_cp(found.batch[name][0], 10, 1)]
    at = zigzag(10, rank)
    logits = torch.stack([found.logits.detach()[0, one] if one >= 0 else torch.zeros(VOCAB) for one in at])
    grad, metrics = step(found, logits[None].requires_grad_(), SPECS[0], "none")
    counts: list = [None, None]
    dist.all_gather_object(counts, (len(found.batch["advantages"][0]), bool(grad.any()), list(metrics)))
    assert sorted(count[:2] for count in counts) == [(0, False), (1, True)] and counts[0][2] == counts[1][2]
    # Rows of one sample under another's tokens are noticed by the rank that has them.
    swapped = packed(SPECS[0], shapes=((3, 5), (2, 5)))
    first, second = swapped.batch[ATTRIBUTE]
    swapped.batch[ATTRIBUTE] = [replace(first, rows=second.rows), replace(second, rows=first.rows)]
    for name in TOKENWISE:
        swapped.batch[name] = [
            slice_log_prob_with_cp(one, total, 5)
            for one, total in zip(swapped.batch[name], swapped.batch["total_lengths"], strict=True)
        ]
    width = sum(len(zigzag(total, rank)) for total in swapped.batch["total_lengths"])
    try:
        step(swapped, torch.zeros(1, width, VOCAB, requires_grad=True), SPECS[0], "none")
    except ValueError as error:
        assert "of other tokens" in str(error)
    else:
        raise AssertionError("rows of another sample were taken")


def main() -> None:
    source, store, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
    stand_ins.install(source)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=200)
    )
    set_state("tp")
    tensor_parallel(rank)
    set_state("cp")
    context_parallel(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
