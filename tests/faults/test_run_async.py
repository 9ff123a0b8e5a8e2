"""Sampling ahead of training: how old the weights of a rollout are, that nothing older is trained on, and the audit."""

import threading

import numpy as np
import pytest

from experiments.audit import audit_rows
from experiments.config import save
from experiments.rollouts import load_rollout, rollout_file
from experiments.tracking import read_metrics
from tests.faults import local

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("staleness", [0, 1, 2, 7])
def test_a_rollout_is_as_stale_as_declared_and_the_audit_knows(staleness, models, tmp_path, monkeypatch):
    local.in_process(monkeypatch)
    config = save(local.settings(models, tmp_path, max_staleness=staleness))
    folder, said = local.run(config)
    assert "FAILED" not in said[-1]
    for step in range(local.STEPS):
        rollout = load_rollout(rollout_file(folder, step))
        versions = np.unique(np.concatenate([t.completion.weight_version for t in rollout.trajectories]))
        assert versions.tolist() == [1 + max(0, step - staleness)]
    series = read_metrics(folder)
    expected = {step: min(step, staleness) for step in range(local.STEPS)}
    assert series["rollout/staleness_max"] == series["rollout/staleness_mean"] == expected
    wrong = {row.name for row in audit_rows(config.run_dir) if not row.passed}
    assert wrong <= {"dflash2-s5/gradients", "dflash2-s5/logprob_gap"}, "the tiny task teaches nothing"


def test_sampling_and_training_overlap(models, tmp_path, monkeypatch):
    """Each side waits until the other is at work: it would wait for ever where one came after the other."""
    local.in_process(monkeypatch)
    both = threading.Barrier(2)
    generate, train = local.LocalPool.generate, local.LocalTrainer.train
    calls = iter(range(100))

    def sampling(pool, requests):
        if next(calls) == 2:  # the rollout of step 1, the evaluation and that of step 0 before it
            both.wait(timeout=30)
        return generate(pool, requests)

    def training(trainer, trajectories, **given):
        if given["step"] == 0:
            both.wait(timeout=30)
        return train(trainer, trajectories, **given)

    monkeypatch.setattr(local.LocalPool, "generate", sampling)
    monkeypatch.setattr(local.LocalTrainer, "train", training)
    _, said = local.run(local.settings(models, tmp_path, max_staleness=1))
    assert "FAILED" not in said[-1]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_stale_version_is_not_trained_on(staleness, models, tmp_path, monkeypatch):
    """An engine that goes on serving old weights, though it says that it took the new ones."""
    local.in_process(monkeypatch)
    update = local.LocalPool.update_weights

    def forgets(pool, manifest, buckets):
        reports = update(pool, manifest, buckets)
        pool.engine.weight_version = min(pool.engine.weight_version, 2)
        pool._versions = range(1, 9)  # nor does the pool notice
        return reports

    monkeypatch.setattr(local.LocalPool, "update_weights", forgets)
    folder, said = local.run(local.settings(models, tmp_path, max_staleness=staleness))
    bad = 2 + staleness
    assert f"the rollout of step {bad} was sampled from weights of versions [2]; accepted: 3 alone" in said[-1]
    assert sorted(read_metrics(folder)["train/loss"]) == list(range(bad)), "the step of the stale rollout never was"
