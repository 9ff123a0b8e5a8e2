"""The loop on real Ray, with models small enough to be quick: what it leaves behind, and that it can be repeated."""

import json
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from safetensors import safe_open

from experiments.arms import run_arm
from experiments.artifacts import read_handoffs, verify_manifest
from experiments.config import ExperimentConfig, save
from experiments.loop import evaluate
from experiments.mismatch.audit import mismatch_rows
from experiments.questions import Questions
from experiments.rollouts import load_rollout, rollout_file
from experiments.tracking import read_metrics
from miles_ext.errors import SupportError
from miles_ext.records import Status
from rollout.embedded.engine import EmbeddedEngine
from rollout.pool import RolloutPool
from tests.rollout.tiny import write_draft, write_target

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    target = write_target(tmp_path_factory.mktemp("target"))
    return {"target": target, "draft": write_draft(tmp_path_factory.mktemp("draft"), target)}


def run(models, folder, *, arm="dflash2", **settings):
    """One arm with seed 5; its folder and what it said."""
    config = ExperimentConfig.model_validate(
        {
            "name": "exp", "output_dir": folder, "steps": 3, "wandb_mode": "disabled", "model": models,
            "arms": [{"name": arm, "kind": arm}],
            "task": {"prompts": 3, "samples": 4, "max_new_tokens": 12, "eval_problems": 8},
            "trainer": {"lr": 1e-2, "advantage": "raw", "advantage_baseline": 0.5},
            "rollout": {"context_length": 48, "max_concurrency": 16},
        }
        | settings
    )  # fmt: skip
    config = save(config)
    said: list[str] = []
    run_arm(config, config.arms[0], 5, said.append, debug=False)
    return config.run_dir / f"{arm}-s5", said


def test_an_arm_leaves_everything_that_a_check_needs_and_repeats_itself(ray_cluster, models, tmp_path):
    folder, said = run(models, tmp_path)
    assert verify_manifest(folder)["failure"] == ""
    said = [line for line in said if not line.startswith("ALARM")]
    assert [line.split("]")[0] for line in said] == ["[dflash2-s5 1/3", "[dflash2-s5 2/3", "[dflash2-s5 3/3"]

    metrics = read_metrics(folder)
    assert set(metrics["eval/reward"]) == {0, 2}
    everywhere = {name for name, points in metrics.items() if set(points) == {0, 1, 2}}
    assert everywhere == set(metrics) - {"eval/reward", "eval/trained_reward"} and len(everywhere) > 30
    assert set(metrics["handoff/draft_unchanged"].values()) == {1.0}
    assert min(metrics["sc/correction_norm"].values()) > 1e-4
    assert max(metrics["spec/accept_length"].values()) > 1

    sent = read_handoffs(folder)
    assert [(line["step"], line["version"]) for line in sent] == [(-1, 1), (0, 2), (1, 3), (2, 4)]
    assert len({line["sent_digest"] for line in sent}) == 4
    start = json.loads((folder / "start.json").read_text())
    assert start["weights_digest"] == sent[0]["sent_digest"]
    for step in range(3):
        rollout = load_rollout(rollout_file(folder, step))
        assert len(rollout.trajectories) == 12
        versions = {int(v) for t in rollout.trajectories for v in t.completion.weight_version}
        assert versions == {step + 1}, "no rollout mixes versions, and each is drawn from the newest"
        assert (rollout.trajectories[0].completion.support is not None) == (step == 1), "the audited step is kept whole"
    with safe_open(folder / "audit" / "probe.safetensors", "np") as probe:
        assert json.loads(probe.metadata()["probe"])["step"] == 1
    assert (folder / "checkpoints" / "step-000003" / "contents.json").is_file()
    assert (folder / "checkpoints" / "model" / "model.safetensors").is_file()
    point = json.loads((folder / "checkpoints" / "step-000003" / "run.json").read_text())
    assert point["step"] == 3 and len(point["wandb_id"]) == 8

    again, _ = run(models, tmp_path / "again")
    assert [line["sent_digest"] for line in read_handoffs(again)] == [line["sent_digest"] for line in sent]


def test_arms_see_the_same_prompts_and_begin_from_the_same_weights(ray_cluster, models, tmp_path):
    found = [run(models, tmp_path, arm=arm, steps=1)[0] for arm in ("regular", "dflash2")]
    prompts = [
        [t.completion.prompt_ids.tolist() for t in load_rollout(rollout_file(folder, 0)).trajectories]
        for folder in found
    ]
    assert prompts[0] == prompts[1] and len({tuple(prompt) for prompt in prompts[0]}) == 3
    starts = [json.loads((folder / "start.json").read_text()) for folder in found]
    assert starts[0]["trained_digest"] == starts[1]["trained_digest"] == starts[0]["weights_digest"]
    assert [s["capabilities"][0]["arm"] for s in starts] == ["regular", "dflash2"]


def test_a_declared_mismatch_is_served_late_and_recorded_and_audited(ray_cluster, models, tmp_path):
    """bfloat16 one handoff late; int4 and noise: the audit reads what was served, another declaration is red."""
    rollout = {"context_length": 48, "max_concurrency": 16}
    declared = {"quantise": "int4", "noise": 0.1}
    late, _ = run(models, tmp_path / "late", rollout=rollout | {"mismatch": {"lag": 1}, "dtype": "bfloat16"})
    other, said = run(models, tmp_path / "other", steps=2, rollout=rollout | {"mismatch": declared})
    assert verify_manifest(other)["failure"] == "" == verify_manifest(late)["failure"], said

    served = [
        {int(v) for t in load_rollout(rollout_file(late, step)).trajectories for v in t.completion.weight_version}
        for step in range(3)
    ]
    assert served == [{1}, {1}, {2}], "the weights of one handoff ago, once there are any"
    sent = [(line["step"], line["version"], line["transform"]) for line in read_handoffs(late)]
    assert sent == [(-1, 1, {}), (1, 2, {}), (2, 3, {}), (3, 5, {})]
    transform = {**declared, "seed": 5}
    assert [line["transform"] for line in read_handoffs(other)] == [transform, transform, transform, {}]
    starts = [json.loads((folder / "start.json").read_text()) for folder in (late, other)]
    assert starts[0]["trained_digest"] == starts[1]["trained_digest"] and starts[1]["transform"] == transform
    assert starts[0]["weights_digest"] != starts[1]["weights_digest"], "sent in bfloat16, and with a transform"
    metrics = read_metrics(other)
    assert set(metrics["eval/trained_reward"]) == {1}
    for folder in (late, other):
        rows = {row.name: row for row in mismatch_rows(folder)}
        assert all(row.passed for row in rows.values()), rows
        assert ("mismatch/resident" in rows) == (folder == other)
    lines = (other / "handoffs.jsonl").read_text()
    (other / "handoffs.jsonl").write_text(lines.replace('"noise": 0.1', '"noise": 0.2'))
    assert [row.passed for row in mismatch_rows(other)] == [False, True]
    (other / "handoffs.jsonl").write_text(lines)
    config = other.parent / "config.yaml"
    config.write_text(config.read_text().replace("int4", "int8"))
    assert [row.passed for row in mismatch_rows(other)] == [False, False], "neither the record nor the weights fit"


def test_an_evaluation_without_laws_is_an_error_not_a_low_reward(models):
    config = ExperimentConfig.model_validate({"name": "exp", "arms": [{"name": "a", "kind": "regular"}]})
    engine = EmbeddedEngine(models["target"], context_length=48)
    asked = Questions.held_out(config, 0)
    asked = replace(asked, requests=asked.requests[:3])
    assert 0 <= evaluate(cast(RolloutPool, engine), asked) <= 1
    engine.target.norm.fill_(float("nan"))
    with pytest.raises(SupportError, match="3 of 3 responses met logits that are not finite, first 'held out 0"):
        evaluate(cast(RolloutPool, engine), asked)


def test_rows_that_break_the_contract_never_become_trajectories(models):
    config = ExperimentConfig.model_validate({"name": "exp", "arms": [{"name": "a", "kind": "regular"}]})
    engine = EmbeddedEngine(models["target"], context_length=48)
    asked = Questions.training(config, 0, 0)
    asked = replace(asked, requests=asked.requests[:2])
    first, second = engine.generate(asked.requests)
    assert len(asked.trajectories([first, second], engine.vocab_size)) == 2
    assert second.support is not None
    late = replace(second, response_ids=np.roll(second.response_ids, 1))
    with pytest.raises(SupportError, match="the sampled logprob differs"):
        asked.trajectories([first, late], engine.vocab_size)


FILTERED = {"top_p": 0.9, "max_support": 27}  # about half of the random target's responses hold a larger law


def test_a_support_that_overflows_ends_the_arm_and_is_on_disk(ray_cluster, models, tmp_path):
    folder, said = run(models, tmp_path, arm="regular", sampling=FILTERED, steps=1)
    failure = verify_manifest(folder)["failure"]
    assert "OVERFLOW" in failure and "trainer.content_failure" in failure
    assert said == [f"arm regular-s5 FAILED: {failure}"]
    kept = load_rollout(rollout_file(folder, 0)).trajectories
    assert any(t.completion.worst_status is Status.OVERFLOW for t in kept), "what could not be trained on is kept"


def test_groups_with_an_overflow_are_left_out_counted_and_raise_an_alarm(ray_cluster, models, tmp_path):
    folder, said = run(
        models, tmp_path, arm="regular", steps=1, sampling=FILTERED,
        trainer={"content_failure": "drop_group", "advantage": "raw"},
        task={"prompts": 8, "samples": 1, "max_new_tokens": 6, "eval_problems": 4},
    )  # fmt: skip
    assert verify_manifest(folder)["failure"] == ""
    dropped = read_metrics(folder)["rollout/untrainable_groups"][0]
    kept = load_rollout(rollout_file(folder, 0))
    overflowed = [t.completion.worst_status is Status.OVERFLOW for t in kept.trajectories]
    assert 0 < sum(overflowed) == dropped < 8
    assert np.all(kept.advantages[overflowed] == 0)
    assert said[-2].startswith(f"ALARM regular-s5 untrainable: {dropped:.0f} groups untrainable so far; see")
    assert read_metrics(folder)["alarm/untrainable"] == {0: 1.0}
