"""A micro-batch as Miles packs it with the laws of its tokens, and a float64 reference of the loss."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from miles_ext.miles_adapter.samples import ATTRIBUTE, SampleRows
from miles_ext.records import SupportRows
from miles_ext.sampling import SamplingSpec

VOCAB = 20
SHAPES = ((3, 5), (2, 4), (5, 2))  # prompt and response tokens of each sample


def arguments(**changes: Any) -> Namespace:
    """Those of Miles' arguments that its loss reads."""
    given = dict(
        loss_type="custom_loss", custom_loss_function_path="miles_ext.miles_adapter.loss.score_centered_loss",
        calculate_per_token_loss=False, qkv_format="thd", recompute_loss_function=False, allgather_cp=False,
        use_dynamic_global_batch_size=False, global_batch_size=3, true_on_policy_mode=False, rollout_temperature=1.0,
        rollout_top_k=-1, rollout_top_p=1.0, log_probs_chunk_size=-1, vocab_size=VOCAB, advantage_estimator="grpo",
        use_rollout_logprobs=False, entropy_coef=0.0, observe_training_entropy=False, use_opsm=False, eps_clip=0.2,
        eps_clip_high=0.2, eps_clip_c=None, get_mismatch_metrics=False, use_tis=False, custom_tis_function_path=None,
        custom_pg_loss_reducer_function_path=None, tis_clip=2.0, tis_clip_low=0.0, use_kl_loss=False, kl_coef=0.0,
        skip_actor_forward_only=False, multi_lora_n_adapters=0, sglang_speculative_algorithm=None, sc_head_size=6,
    )  # fmt: skip
    return Namespace(**{**given, **changes})


@dataclass
class Packed:
    """logits: float32 [1, T, VOCAB], a leaf. q: float64 [R, VOCAB], the laws of the R response tokens, whole."""

    batch: dict[str, Any]
    logits: torch.Tensor
    q: torch.Tensor
    rows_of_logits: torch.Tensor
    tokens: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor


def packed(spec: SamplingSpec, seed: int = 0, noise: float = 0.8, shapes=SHAPES) -> Packed:
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    total = sum(prompt + response for prompt, response in shapes)
    logits = 2 * torch.randn(1, total, VOCAB)
    sampler = (logits[0] + noise * torch.randn(total, VOCAB)).double() / spec.temperature
    names = ("unconcat_tokens", "total_lengths", "response_lengths", "loss_masks", "advantages", "log_probs")
    batch: dict[str, list] = {name: [] for name in (*names, "rollout_log_probs", ATTRIBUTE)}
    every_q, positions, start = [], [], 0
    for prompt, response in shapes:
        at = torch.arange(start + prompt - 1, start + prompt + response - 1)
        q = _filtered(sampler[at], spec)
        tokens = torch.tensor([rng.choice(VOCAB, p=row) for row in q.numpy()])
        rows = rows_from(q, tokens, spec)
        advantage, mask = float(rng.normal()), torch.ones(response, dtype=torch.int)
        mask[-1] = int(response < 4)  # the last token of long responses is not trained
        old = torch.log_softmax(logits[0, at] / spec.temperature, -1).gather(1, tokens[:, None])[:, 0]
        batch["unconcat_tokens"].append(torch.cat([torch.zeros(prompt, dtype=torch.long), tokens]))
        batch["total_lengths"].append(prompt + response)
        batch["response_lengths"].append(response)
        batch["loss_masks"].append(mask)
        batch["advantages"].append(torch.full((response,), advantage))
        batch["log_probs"].append(old)
        batch["rollout_log_probs"].append(torch.from_numpy(rows.sampled_logprobs.copy()))
        batch[ATTRIBUTE].append(SampleRows(rows=rows, spec=spec, vocab_size=VOCAB))
        every_q.append(q)
        positions.append(at)
        start += prompt + response
    responses = [one[-n:] for one, n in zip(batch["unconcat_tokens"], batch["response_lengths"], strict=True)]
    return Packed(
        batch=batch, logits=logits.requires_grad_(), q=torch.cat(every_q), rows_of_logits=torch.cat(positions),
        tokens=torch.cat(responses), advantages=torch.cat(batch["advantages"]), mask=torch.cat(batch["loss_masks"]),
    )  # fmt: skip


def _filtered(z: torch.Tensor, spec: SamplingSpec) -> torch.Tensor:
    if spec.top_k:
        z = z.masked_fill(z < z.topk(spec.top_k, -1).values[:, -1:], -torch.inf)
    return z.softmax(-1)


def rows_from(q: torch.Tensor, tokens: torch.Tensor, spec: SamplingSpec) -> SupportRows:
    logq = q.log().float().numpy()
    if spec.capture == "head":
        ids = [np.argsort(-row, kind="stable")[: spec.head_size] for row in logq]
    else:
        ids = [np.flatnonzero(np.isfinite(row)) for row in logq]
    return SupportRows(
        token_ids=np.concatenate(ids).astype(np.int32),
        logprobs=np.concatenate([row[one] for row, one in zip(logq, ids, strict=True)]),
        offsets=np.cumsum([0, *map(len, ids)]).astype(np.int64),
        sampled_logprobs=logq[np.arange(len(tokens)), tokens.numpy()],
        kind="head" if spec.capture == "head" else "complete",
        status=np.zeros(len(tokens), np.uint8),
    )


def reference(
    found: Packed, spec: SamplingSpec, mode: str, centering: str, *, per_token: bool = False, clip: float = 2.0,
    band: tuple[float, float] = (0.5, 5.0),
) -> torch.Tensor:
    """Gradient in the logits, float64 [T, VOCAB], by autograd on explicit laws over the whole vocabulary."""
    logits = found.logits.detach()[0].double().requires_grad_()
    z = logits[found.rows_of_logits] / spec.temperature
    q = found.q
    if spec.capture == "complete":
        z = z.masked_fill(q == 0, -torch.inf)
    logp = z.log_softmax(-1)
    p, each = logp.exp().detach(), torch.arange(len(q))
    if spec.capture == "head":  # the tail of q is modelled as proportional to p
        head = torch.zeros_like(q, dtype=torch.bool).scatter(1, q.topk(spec.head_size, -1).indices, True)
        rho = torch.where(head, 0, q).sum(-1, keepdim=True) / torch.where(head, 0, p).sum(-1, keepdim=True)
        model = torch.where(head, q, rho * p)
    else:
        model = q

    def weight(ratio: torch.Tensor) -> torch.Tensor:
        if mode == "none":
            return torch.ones_like(ratio)
        if mode == "tis":
            return ratio.clamp(max=clip)
        return torch.where((ratio >= band[0]) & (ratio <= band[1]), ratio, 0.0)

    y = found.tokens
    w = weight(p[each, y] / q[each, y])
    per = w * logp[each, y]
    if centering == "on":
        mass = torch.where(model > 0, model * weight(torch.where(model > 0, p / model, 0.0)), 0.0)
        per = per - (mass * torch.where(mass > 0, logp, 0.0)).sum(-1)
    losses = -found.advantages.double() * per * found.mask
    lengths = found.batch["response_lengths"]
    if per_token:
        total = losses.sum()
    else:
        means = zip(losses.split(lengths), found.mask.split(lengths), strict=True)
        total = torch.stack([one.sum() / max(int(mask.sum()), 1) for one, mask in means]).sum()
    total.backward()
    assert logits.grad is not None
    return logits.grad
