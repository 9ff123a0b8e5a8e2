"""The gradient of a whole step, the slow way: one sequence at a time, plain autograd through the surrogate loss."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM


def weight(ratio, settings):
    if settings.mode == "none":
        return torch.ones_like(ratio)
    if settings.mode == "tis":
        return ratio.clamp(max=settings.tis_clip)
    return torch.where((ratio >= settings.mis_low) & (ratio <= settings.mis_high), ratio, torch.zeros_like(ratio))


def token_loss(logits, trajectory, t, advantage, settings, temperature):
    """-A [w_y log p_y - sum_v q_v w_v log p_v] of response token t, where the sum is the centering."""
    row = trajectory.completion.support[t : t + 1]
    ids, q = torch.from_numpy(row.token_ids).long(), torch.from_numpy(row.logprobs).double().exp()
    sampled = int(trajectory.completion.response_ids[t])
    if row.kind == "complete":
        lp = torch.log_softmax(logits[ids] / temperature, -1)
        lp_sampled = lp[ids == sampled][0]
    else:
        lp = torch.log_softmax(logits / temperature, -1)
        lp_sampled = lp[sampled]
        p = lp.detach().exp()
        in_head = torch.zeros_like(p, dtype=torch.bool).index_fill(0, ids, True)
        ratio_of_tails = (1 - q.sum()) / p[~in_head].sum()
        q = torch.where(in_head, torch.zeros_like(p).index_put((ids,), q), ratio_of_tails * p)
    p = lp.detach().exp()
    w = weight((lp_sampled.detach() - float(row.sampled_logprobs[0])).exp(), settings)
    loss = w * lp_sampled
    if settings.centering == "on":
        loss = loss - (q * weight(p / q, settings) * lp).sum()
    return -advantage * loss


def gradients(target, trajectories, advantages, settings, temperature, reduction):
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64, attn_implementation="sdpa").eval()
    tokens = sum(int(trajectory.loss_mask.sum()) for trajectory in trajectories)
    for trajectory, advantage in zip(trajectories, advantages, strict=True):
        completion = trajectory.completion
        ids = torch.tensor([[*completion.prompt_ids.tolist(), *completion.response_ids.tolist()]])
        logits = model(ids).logits[0]
        chosen = [t for t in range(len(completion)) if trajectory.loss_mask[t]]
        losses = [
            token_loss(logits[len(completion.prompt_ids) + t - 1], trajectory, t, advantage, settings, temperature)
            for t in chosen
        ]
        total = torch.stack(losses).sum()
        share = tokens if reduction == "token_mean" else len(chosen) * len(trajectories)
        (total / share).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
