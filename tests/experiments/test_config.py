from pathlib import Path

import pytest

from experiments.config import ExperimentConfig, dump, load, save
from experiments.reference import reference

QUICKSTART = Path("experiments/configs/quickstart.yaml")
ARMS = [{"name": "a", "kind": "regular"}, {"name": "b", "kind": "dflash2"}]


def make(**settings) -> ExperimentConfig:
    return ExperimentConfig.model_validate({"name": "exp", "arms": ARMS} | settings)


@pytest.mark.parametrize("file", sorted(QUICKSTART.parent.glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_files_load_and_survive_a_round_trip(file, tmp_path):
    config = load(file)
    config.model.require_files(config.arms)
    copy = tmp_path / "config.yaml"
    copy.write_text(dump(config))
    assert load(copy) == config


def test_overrides_reach_every_level_and_values_are_read_as_yaml():
    overrides = [("trainer.estimator.centering", "off"), ("trainer.lr", "1e-4"), ("seeds", "[3, 4]"), ("steps", "7")]
    config = load(QUICKSTART, overrides)
    assert (config.trainer.estimator.centering, config.trainer.lr) == ("off", 1e-4)
    assert (config.seeds, config.steps, config.trainer.updates_per_rollout) == ((3, 4), 7, 2)


def test_on_and_off_are_words_in_a_file(tmp_path):
    file = tmp_path / "words.yaml"
    file.write_text("arms: [{name: a, kind: regular}]\ntrainer: {advantage_std: false, estimator: {centering: off}}\n")
    config = load(file)
    assert config.name == "words" and config.trainer.estimator.centering == "off" and not config.trainer.advantage_std


def test_an_arm_overrides_its_own_settings_alone():
    override = {"trainer.estimator.centering": "diagnose", "sampling.top_k": 5}
    config = make(arms=[ARMS[0], {**ARMS[1], "overrides": override}])
    regular, changed = (config.for_arm(arm) for arm in config.arms)
    assert (regular.trainer, regular.sampling) == (config.trainer, config.sampling)
    assert (changed.trainer.estimator.centering, changed.sampling.top_k) == ("diagnose", 5)
    assert changed.trainer.lr == config.trainer.lr and changed.task == config.task


def test_the_reference_is_current_and_explains_what_a_value_alone_does_not():
    page = Path("docs/configuration.md").read_text()
    assert page == reference(), "run make docs"
    assert all(f"`{key}`" in page for key in ("trainer.estimator.tis_clip", "rollout.max_restarts", "overrides"))
    assert [line for line in page.splitlines() if line.endswith("|  |")] == []


def test_an_earlier_run_is_never_touched(tmp_path):
    config = make(output_dir=tmp_path)
    first, second, third = save(config), save(config), save(config)
    assert [c.run_dir.name for c in (first, second, third)] == ["exp", "exp-2", "exp-3"]
    assert load(third.run_dir / "config.yaml") == third


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainer": {"lrr": 1}}, "trainer.lrr: unknown key; did you mean trainer.lr?"),
        ({"lr": 1}, "lr: unknown key; did you mean trainer.lr?"),
        ({"sampling": {"zzzzzz": 1}}, "docs/configuration.md lists the accepted ones"),
        ({"sampling": {"top_p": 1.5}}, "top_p is 1.5; accepted: 0 < top_p <= 1"),
        ({"sampling": {"top_p": 0}}, "top_p is 0.0; accepted: 0 < top_p <= 1"),
        ({"sampling": {"temperature": -1}}, "temperature is -1.0; accepted: finite and >= 0"),
        ({"sampling": {"temperature": 0}}, "greedy decoding has no law to train on"),
        ({"sampling": {"capture": "off"}}, "training needs the recorded laws"),
        ({"sampling": {"capture": "head", "top_k": 5}}, "a head needs the unfiltered law"),
        ({"arms": [ARMS[0], ARMS[0]]}, "arm names a occur twice"),
        ({"seeds": [1, 1]}, "seeds 1 occur twice"),
        ({"name": "a/b"}, "name: 'a/b' is refused: accepted: a name that can be a folder"),
        ({"arms": [{"name": "a", "kind": "fast"}]}, "arms.0.kind: 'fast' is refused: input should be 'regular'"),
        ({"arms": [{**ARMS[0], "overrides": {"task.prompts": 2}}]}, "arm 'a' overrides task.prompts; an arm may"),
        ({"arms": [{**ARMS[0], "overrides": {"trainer.lrr": 2}}]}, "arm 'a': trainer.lrr: unknown key; did you mean"),
        ({"trainer": {"lr": "much"}}, "trainer.lr: 'much' is refused: input should be a valid number"),
        ({"trainer": {"estimator": {"mis_low": 6}}}, "mis_low is 6.0 beside mis_high 5.0; accepted: mis_low <"),
        ({"trainer": {"betas": [0.9, 1]}}, "trainer.betas.1: 1 is refused: input should be less than 1"),
        ({"trainer": {"cpus_per_worker": 0}}, "cpus_per_worker and gpus_per_worker are both 0"),
        ({"task": {"samples": 1}}, "task.samples is 1 beside trainer.advantage 'group'"),
        ({"seeds": [-1]}, "seeds.0: -1 is refused: input should be greater than or equal to 0"),
        ({"steps": 0}, "steps: 0 is refused: input should be greater than or equal to 1"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_what_is_wrong_is_said_with_its_mend(settings, message, tmp_path):
    import yaml

    file = tmp_path / "exp.yaml"
    file.write_text(yaml.safe_dump({"arms": ARMS} | settings))
    with pytest.raises(ValueError) as caught:
        load(file)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": {"target": "nowhere"}}, "model.target is nowhere, where there is no config.json"),
        ({"model": {"draft": "nowhere"}}, "model.draft is nowhere, where there is no config.json"),
        ({"model": {"draft": None}}, r"model.draft is null, but arms \['b'\] need one"),
    ],
)
def test_missing_checkpoints_are_named_before_anything_starts(settings, message):
    config = make(**settings)
    with pytest.raises(ValueError, match=message):
        config.model.require_files(config.arms)


def test_a_regular_arm_needs_no_draft():
    config = make(arms=ARMS[:1], model={"draft": None})
    config.model.require_files(config.arms)
