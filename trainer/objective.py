"""What one micro-batch contributes: the scaled estimator loss and the sums that become metrics."""

from __future__ import annotations

import torch

from miles_ext.logprobs import VocabShard
from miles_ext.score_centering import EstimatorConfig, SupportTensors, score_centered_loss
from trainer.backends.base import LossFn
from trainer.batch import Batch
from trainer.config import EstimatorSettings

# Metric of a step: what the estimator calls it. Each is a mean over loss tokens.
TOKEN_MEANS = {
    "train/pg_loss": "pg_loss",
    "train/train_rollout_logprob_abs_diff": "logprob_gap",
    "train/ratio_clip_fraction": "weight_clipped",
    "train/ratio_mean": "ratio",
    "train/entropy": "entropy",
    "sc/correction_norm": "correction_norm",
    "sc/head_mass": "support_mass_q",
    "sc/trainer_head_mass": "support_mass_p",
    "sc/support_size": "support_size",
    "sc/sampled_in_head": "sampled_in_support",
    "sc/tail_ratio": "tail_ratio",
}
SUMS = ("loss", "tokens", *TOKEN_MEANS)


def estimator(settings: EstimatorSettings) -> EstimatorConfig:
    return EstimatorConfig(
        mode=settings.mode, centering=settings.centering, tis_clip=settings.tis_clip,
        mis_low=settings.mis_low, mis_high=settings.mis_high, entropy=True,
    )  # fmt: skip


def objective(batch: Batch, cfg: EstimatorConfig, temperature: float, shard: VocabShard | None = None) -> LossFn:
    """loss_fn(logits [m, v], rows) -> (sum over rows of scale * loss, float64 sums [k] in the order of `SUMS`).

    shard: which columns of the vocabulary the logits are (None: all of it). On a GPU the gradient takes the place of
    the logits in memory."""

    def loss_fn(logits: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        law, device = batch.support[rows], logits.device
        support = SupportTensors.from_arrays(
            law.token_ids, law.logprobs, law.offsets, batch.sampled_ids[rows], law.sampled_logprobs, law.kind, device
        )
        advantages, scale = (torch.from_numpy(array[rows]).to(device) for array in (batch.advantages, batch.scale))
        per_token, found = score_centered_loss(logits, support, advantages, cfg, temperature, shard, consume=True)
        found["ratio"] = (found["logprob"] - support.sampled_logprobs).exp()
        loss = (per_token * scale.to(per_token.dtype)).sum()
        sums = [found[name].sum(dtype=torch.float64) for name in TOKEN_MEANS.values()]
        tokens = torch.tensor(len(support), dtype=torch.float64, device=device)
        return loss, torch.stack([loss.detach().double(), tokens, *sums])

    return loss_fn
