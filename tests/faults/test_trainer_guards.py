"""What is not finite, and what deserves an alarm: counted, said, never in the weights."""

import json
import math

import numpy as np
import pytest
import torch

from experiments.alarms import Alarms
from experiments.comparison import compare
from experiments.config import AlarmConfig, save
from experiments.report import write_report
from experiments.tracking import read_metrics
from experiments.zero_lr import arm_rows, control, zero_lr
from miles_ext.errors import TrainingError
from tests.faults import local
from trainer.backends.torch import TorchBackend
from trainer.config import TrainerConfig
from trainer.step import train_step

pytestmark = pytest.mark.faults


def sent(folder) -> list[str]:
    return [json.loads(line)["sent_digest"] for line in (folder / "handoffs.jsonl").read_text().splitlines()]


def poison(monkeypatch, where: str, step: int) -> None:
    """A NaN or inf at one place of the step, from the outside of what is tested."""
    train, generate, calls = local.LocalTrainer.train, local.LocalPool.generate, iter(range(100))

    def training(trainer, trajectories, **given):
        parameter = next(iter(trainer.backend.parameters.values()))
        hook = None
        if where == "gradient" and given["step"] == step:
            hook = parameter.register_hook(lambda gradient: gradient * math.inf)
        if where == "logits" and given["step"] == step:
            hook = trainer.backend.scorer.head.register_forward_hook(lambda *call: call[2] * math.nan)
        try:
            return train(trainer, trajectories, **given)
        finally:
            if hook:
                hook.remove()

    def sampling(pool, requests):
        completions = generate(pool, requests)
        if where == "support" and next(calls) == step + 1:
            rows = completions[0].support
            assert rows is not None
            rows.logprobs[0] = np.nan
        return completions

    monkeypatch.setattr(local.LocalTrainer, "train", training)
    monkeypatch.setattr(local.LocalPool, "generate", sampling)


@pytest.mark.parametrize("where", ["gradient", "logits"])
def test_what_is_not_finite_ends_the_step_is_counted_and_reaches_no_weight(where, models, tmp_path, monkeypatch):
    local.in_process(monkeypatch)
    poison(monkeypatch, where, step=2)
    folder, said = local.run(local.settings(models, tmp_path))
    assert "FAILED: TrainingError" in said[-1] and "the weights were not touched" in said[-1]
    series = read_metrics(folder)
    assert series["train/skipped_updates"] == {0: 0.0, 1: 0.0, 2: 1.0} and series["alarm/non_finite"][2] == 1.0
    assert len(sent(folder)) == 3 and "2" not in {str(step) for step in series["train/loss"]}
    monkeypatch.undo()
    local.in_process(monkeypatch)
    resumed, _ = local.run(local.settings(models, tmp_path))
    whole, _ = local.run(local.settings(models, tmp_path / "whole"))
    assert local.evidence(resumed) == local.evidence(whole), "nothing of the poisoned step stayed in the weights"


def test_a_law_that_is_not_finite_is_trained_on_nowhere(models, tmp_path, monkeypatch):
    local.in_process(monkeypatch)
    poison(monkeypatch, "support", step=2)
    folder, said = local.run(local.settings(models, tmp_path))
    assert "FAILED: SupportError" in said[-1] and "a logprob is not finite" in said[-1]
    assert len(sent(folder)) == 3 and sorted(read_metrics(folder)["train/loss"]) == [0, 1]


def test_updates_that_are_left_out_leave_the_weights_and_are_counted_up_to_the_budget(models, tmp_path, monkeypatch):
    local.in_process(monkeypatch)
    poison(monkeypatch, "gradient", step=2)
    trainer = TrainerConfig(lr=1e-2, advantage="raw", advantage_baseline=0.5, max_skipped_updates=2)
    folder, said = local.run(local.settings(models, tmp_path, trainer=trainer))
    assert not any("FAILED" in line for line in said)
    digests = sent(folder)
    assert digests[3] == digests[2] and len(set(digests)) == 5, "of step 2 nothing reached the weights"
    assert sum(read_metrics(folder)["train/skipped_updates"].values()) == 2
    assert any(line.startswith("ALARM dflash2-s5 non_finite: 2 updates") for line in said)
    with pytest.raises(TrainingError):
        one = local.LocalTrainer(trainer, models["target"], 0)
        assert isinstance(one.backend, TorchBackend)
        weight = next(iter(dict(one.backend.model.named_parameters()).values()))
        hook = weight.register_hook(lambda gradient: gradient * math.nan)
        rollout = [t for t in local.last_rollout(folder)]
        train_step(one.backend, rollout, trainer, temperature=1.0, skips=1)
    hook.remove()


def test_a_storm_of_overflows_leaves_every_prompt_trained_or_named(models, tmp_path, monkeypatch):
    local.in_process(monkeypatch)
    config = local.settings(
        models, tmp_path, sampling={"top_p": 0.9, "max_support": 27},
        trainer={"lr": 1e-3, "advantage": "raw", "content_failure": "drop_group"},
        task={"prompts": 6, "samples": 1, "max_new_tokens": 4, "eval_problems": 2},
    )  # fmt: skip
    folder, said = local.run(config)
    assert not any("FAILED" in line for line in said), said
    assert local.prompts_trained(folder) == list(range(6 * local.STEPS)), "the dropped ones are in the rollouts too"
    dropped = read_metrics(folder)["rollout/untrainable_groups"]
    assert 0 < sum(dropped.values()) < 6 * local.STEPS
    assert sum("untrainable:" in line for line in said) == 1, "said when it begins, not at every step"


STEADY = {
    "rollout/raw_reward": 0.8, "spec/accept_length": 4.0, "train/train_rollout_logprob_abs_diff": 0.01,
    "train/entropy": 0.5, "rollout/untrainable_groups": 0.0, "train/skipped_updates": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("word", "metric", "value"),
    [
        ("reward", "rollout/raw_reward", -0.5), ("accept_length", "spec/accept_length", 1.0),
        ("logprob_gap", "train/train_rollout_logprob_abs_diff", 0.9), ("entropy", "train/entropy", 0.0),
        ("entropy", "train/entropy", math.nan), ("logprob_gap", "train/train_rollout_logprob_abs_diff", math.nan),
        ("untrainable", "rollout/untrainable_groups", 3.0), ("non_finite", "train/skipped_updates", 1.0),
    ],
)  # fmt: skip
def test_each_alarm_rings_for_its_own_metric_and_a_continued_run_judges_alike(word, metric, value):
    def judge(alarms, steps):
        return [alarms.judge(STEADY | ({metric: value} if step >= 9 else {})) for step in steps]

    said: list[str] = []
    alarms = Alarms(AlarmConfig(window=2), 4, "a-s0", said.append, {})
    rings = judge(alarms, range(12))
    assert all(not any(ring.values()) for ring in rings[:9])
    assert {name for name, ring in rings[11].items() if ring} == {f"alarm/{word}"}
    assert len(said) == 1 and said[0].startswith(f"ALARM a-s0 {word}: ")
    lines = [STEADY | ({metric: value} if step >= 9 else {}) | rings[step] for step in range(10)]
    history = {name: {step: line[name] for step, line in enumerate(lines)} for name in lines[0]}
    assert judge(Alarms(AlarmConfig(window=2), 4, "a-s0", said.append, history), range(10, 12)) == rings[10:]
    assert len(said) == 1


def test_alarms_are_in_metrics_table_and_report(models, tmp_path, monkeypatch):
    local.in_process(monkeypatch)
    config = save(local.settings(models, tmp_path, alarms={"entropy_low": 50.0}))
    folder, said = local.run(config)
    assert sum(line.startswith("ALARM dflash2-s5 entropy: ") for line in said) == 1
    assert set(read_metrics(folder)["alarm/entropy"].values()) == {1.0}
    assert compare(config.run_dir)["arms"][0]["alarms"]["entropy"] == list(range(local.STEPS))
    assert "dflash2-s5 alarm entropy: 5 steps, first 0, last 4" in write_report(config.run_dir).read_text()


def run_here(config):
    config = save(config)
    local.run(config)
    return config


def test_without_learning_trainer_and_sampler_agree_but_for_rounding(models, tmp_path, monkeypatch):
    local.in_process(monkeypatch)
    config = local.settings(models, tmp_path)
    rows = zero_lr(config, run_here)
    assert [row.name.split("/")[-1] for row in rows] == ["logprob_gap", "weights", "finished"]
    assert all(row.passed for row in rows) and 0 < rows[0].value < 1e-5


@pytest.mark.parametrize("broken", ["row", "temperature", "weights"])
def test_a_broken_scorer_fails_the_control(broken, models, tmp_path, monkeypatch):
    local.in_process(monkeypatch)
    train = local.LocalTrainer.train

    def training(trainer, trajectories, *, temperature, **given):
        scorer, hidden = trainer.backend.scorer, trainer.backend.scorer.hidden
        if broken == "row":  # scores a token from its own hidden state, not from the one before it
            monkeypatch.setattr(scorer, "hidden", lambda ids: hidden(ids).roll(-1, 0))
        if broken == "weights":
            with torch.no_grad():
                scorer.head.weight.mul_(1.01)
        return train(trainer, trajectories, temperature=temperature * (1.1 if broken == "temperature" else 1), **given)

    monkeypatch.setattr(local.LocalTrainer, "train", training)
    rows = {row.name.split("/")[-1]: row for row in zero_lr(local.settings(models, tmp_path), run_here)}
    assert not rows["logprob_gap" if broken != "weights" else "weights"].passed


def test_the_control_learns_nothing_whatever_an_arm_says(models, tmp_path):
    overrides = {"trainer.lr": 1e-3, "trainer.estimator.mode": "tis"}
    arms = [{"name": "a", "kind": "regular", "overrides": overrides}]
    config = control(local.settings(models, tmp_path, arms=arms))
    assert config.for_arm(config.arms[0]).trainer.lr == 0.0
    assert config.arms[0].overrides == {"trainer.estimator.mode": "tis"} and config.name == "exp-zero-lr"


def test_a_gap_that_is_not_a_number_is_no_agreement(models, tmp_path, monkeypatch):
    local.in_process(monkeypatch)
    config = run_here(control(local.settings(models, tmp_path)))
    folder = config.run_dir / "dflash2-s5"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[1]["train/train_rollout_logprob_abs_diff"] = "nan"
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr("experiments.zero_lr.verify_manifest", lambda arm_dir: {"failure": ""})
    assert not arm_rows(folder)[0].passed
