import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from experiments.artifacts import (
    arm_and_seed,
    arm_dirs,
    bundle,
    read_handoffs,
    record_handoff,
    record_start,
    verify_manifest,
    write_manifest,
)
from experiments.rollouts import load_rollout, save_rollout
from miles_ext.capability import EngineCapability
from miles_ext.weights import HandoffReport, TensorEntry, WeightManifest
from tests.experiments.runs import trajectories


def same(a, b) -> bool:
    """Equal field by field, dtypes included."""
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return a == b


@pytest.mark.parametrize("kind", ["complete", "head", "off"])
def test_a_rollout_comes_back_bit_for_bit(tmp_path, kind):
    rollout = trajectories(0, kind="head" if kind == "off" else kind)
    if kind == "off":
        rollout = [dataclasses.replace(t, completion=dataclasses.replace(t.completion, support=None)) for t in rollout]
    save_rollout(tmp_path / "r" / "a.safetensors", 7, rollout, [0.1, -0.1, 0.5, 0.0])
    loaded = load_rollout(tmp_path / "r" / "a.safetensors")
    assert loaded.step == 7 and loaded.advantages.tolist() == [0.1, -0.1, 0.5, 0.0]
    assert len(loaded.trajectories) == len(rollout) and all(map(same, loaded.trajectories, rollout))
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["a.safetensors"]


def test_a_rollout_that_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="advantages of shape"):
        save_rollout(tmp_path / "a.safetensors", 0, trajectories(0), [0.1])
    mixed = trajectories(0)[:1] + trajectories(0, kind="head")[:1]
    with pytest.raises(ValueError, match=r"kinds \['complete', 'head'\]"):
        save_rollout(tmp_path / "a.safetensors", 0, mixed, [0.1, 0.2])


def fill(arm: Path) -> None:
    (arm / "wandb" / "run" / "logs").mkdir(parents=True)
    (arm / "metrics.jsonl").write_text("{}\n")
    (arm / "wandb" / "run" / "data.wandb").write_bytes(b"\0\1")
    (arm / "wandb" / "run" / "logs" / "debug-core.log").write_text("early")
    (arm / "wandb" / "latest-run").symlink_to("run")


def test_manifest_lists_every_file_and_notices_each_kind_of_change(tmp_path):
    fill(tmp_path)
    write_manifest(tmp_path, failure="engine 0 died")
    (tmp_path / "audit.json").write_text("{}")
    (tmp_path / "wandb" / "run" / "logs" / "debug-core.log").write_text("late")
    manifest = verify_manifest(tmp_path)
    assert manifest["failure"] == "engine 0 died" and set(manifest["files"]) == {
        "metrics.jsonl",
        "wandb/run/data.wandb",
    }
    (tmp_path / "metrics.jsonl").write_text("{ }\n")
    (tmp_path / "new").write_text("")
    (tmp_path / "wandb" / "run" / "data.wandb").unlink()
    with pytest.raises(ValueError, match=r"missing \['wandb/run/data.wandb'\], unlisted \['new'\], changed \['metrics"):
        verify_manifest(tmp_path)


def test_a_missing_manifest_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        verify_manifest(tmp_path)


def test_the_bundle_depends_on_contents_alone(tmp_path):
    digests = []
    for place in ("a", "b"):
        arm = tmp_path / place / "exp" / "regular-s0"
        arm.mkdir(parents=True)
        (tmp_path / place / "exp" / "comparison.json").write_text("{}")
        fill(arm)
        write_manifest(arm)
        (arm / "metrics.jsonl").chmod(0o600)
        digests.append(bundle(tmp_path / place / "exp")[1])
    assert digests[0] == digests[1]
    (arm / "audit.json").write_text("{}")
    assert bundle(tmp_path / "b" / "exp")[1] != digests[0]
    (arm / "metrics.jsonl").write_text("changed")
    with pytest.raises(ValueError, match="changed"):
        bundle(tmp_path / "b" / "exp")


def test_start_and_handoffs_are_kept(tmp_path):
    weights = {"w": TensorEntry((2,), "float32", "0" * 32)}
    first = WeightManifest(version=0, tensors=weights)
    capability = EngineCapability(
        engine="e", engine_version="1", arm="dflash", verifier="target_only", patches=frozenset("ba")
    )
    record_start(tmp_path, first, [capability])
    start = json.loads((tmp_path / "start.json").read_text())
    assert start["weights_digest"] == first.digest and start["capabilities"][0]["patches"] == ["a", "b"]
    report = HandoffReport(version=2, received_digest="r", resident_digest="s", draft_digest="d", seconds=0.25)
    for version in (2, 1, 2):
        record_handoff(tmp_path, version, dataclasses.replace(first, version=version), [report])
    handoffs = read_handoffs(tmp_path)
    assert [line["version"] for line in handoffs] == [1, 2] and handoffs[0]["reports"][0]["seconds"] == 0.25


def test_arm_folders_are_found_and_named(tmp_path):
    with pytest.raises(ValueError, match="holds no arm"):
        arm_dirs(tmp_path)
    (tmp_path / "no-centering-s12").mkdir()
    (tmp_path / "no-centering-s12" / "metrics.jsonl").write_text("")
    assert [arm_and_seed(path) for path in arm_dirs(tmp_path)] == [("no-centering", 12)]
    with pytest.raises(ValueError, match="'other'"):
        arm_and_seed(tmp_path / "other")


def test_what_wandb_does_in_its_own_folder_is_no_change(tmp_path):
    (tmp_path / "wandb" / "offline-run-1").mkdir(parents=True)
    for name in ("metrics.jsonl", "wandb/offline-run-1/run-1.wandb"):
        (tmp_path / name).write_text("a")
    write_manifest(tmp_path)
    (tmp_path / "wandb/offline-run-1/run-1.wandb").write_text("ab")  # flushed late
    (tmp_path / "wandb/offline-run-1/run-1.wandb.synced").touch()
    assert "wandb/offline-run-1/run-1.wandb" in verify_manifest(tmp_path)["files"]
    (tmp_path / "metrics.jsonl").write_text("ab")
    with pytest.raises(ValueError, match="changed \\['metrics.jsonl'\\]"):
        verify_manifest(tmp_path)
