import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from experiments.artifacts import record_start, write_manifest
from experiments.comparison import compare, print_comparison
from experiments.tracking import write_line
from miles_ext.weights import TensorEntry, WeightManifest
from tests.experiments.runs import save, trajectories


def weights(digit: str = "0") -> WeightManifest:
    return WeightManifest(version=0, tensors={"w": TensorEntry((2,), "float32", digit * 32)})


def arm(run: Path, name: str, seed: int, *, digit: str = "0", shift: int = 0, failure: str = "", reward=0.25) -> Path:
    folder = run / name
    record_start(folder, weights(digit), [])
    with (folder / "metrics.jsonl").open("w") as file:
        write_line(file, 0, {"eval/reward": 0.5, "rollout/raw_reward": 0.0, "rollout/tokens_per_s": 100.0})
        for step in range(1, 8):
            write_line(file, step, {"rollout/raw_reward": reward * step, "rollout/tokens_per_s": 300.0})
        write_line(file, 7, {"eval/reward": 0.75})
    for step in range(2):
        save(folder, step, trajectories(seed + step, version=step + shift))
    write_manifest(folder, failure)
    return folder


def test_figures_are_those_of_the_metrics(tmp_path):
    arm(tmp_path, "regular-s0", 1)
    found = compare(tmp_path)["arms"][0]
    assert found["eval"] == {"before": 0.5, "after": 0.75, "gain": 0.25}
    assert found["reward"]["last_quarter"] == pytest.approx(0.25 * 6.5) and found["reward"]["max"] == 1.75
    assert found["tokens_per_s"] == {"first": 100.0, "last": 300.0, "median": 300.0, "min": 100.0, "max": 300.0}
    assert found["accept_length"]["median"] is None and found["steps"] == 8 and found["state"] == "finished"


@pytest.mark.parametrize(("failure", "before", "after"), [("", None, 0.5), ("it broke", 0.5, None)])
def test_one_evaluation_is_the_end_of_a_run_of_one_step_and_the_start_of_any_other(tmp_path, failure, before, after):
    folder = arm(tmp_path, "regular-s0", 1, failure=failure)
    first = (folder / "metrics.jsonl").read_text().splitlines()[0]
    (folder / "metrics.jsonl").write_text(first + "\n")
    assert compare(tmp_path)["arms"][0]["eval"] == {"before": before, "after": after, "gain": None}


def test_arms_with_the_same_prompts_and_weights_are_paired(tmp_path):
    arm(tmp_path, "regular-s0", 1)
    arm(tmp_path, "dflash2-s0", 99)  # other responses, same prompts
    arm(tmp_path, "regular-s1", 1, digit="1", shift=5)  # another seed is not compared
    pairing = compare(tmp_path)["pairing"]
    assert pairing == {"paired": True, "wrong": [], "steps_compared": 2}


def test_other_weights_or_prompts_are_named(tmp_path):
    arm(tmp_path, "regular-s0", 1)
    arm(tmp_path, "b-s0", 1, digit="1")
    arm(tmp_path, "c-s0", 1, shift=1)
    (tmp_path / "d-s0").mkdir()
    (tmp_path / "d-s0" / "metrics.jsonl").write_text("")
    pairing = compare(tmp_path)["pairing"]
    wrong = "; ".join(pairing["wrong"])
    assert not pairing["paired"]
    assert "regular-s0 and b-s0 began from different weights" in wrong
    assert "c-s0 and b-s0 saw different prompts at rollouts [0, 1]" in wrong
    assert "d-s0 has no rollouts" in wrong and "d-s0 has no digest of its initial weights" in wrong


def test_failed_arms_and_nan_are_shown(tmp_path):
    arm(tmp_path, "regular-s0", 1, failure="the gradient is not finite", reward=math.nan)
    comparison = compare(tmp_path)
    json.loads((tmp_path / "comparison.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    console = Console(record=True, width=160)
    print_comparison(comparison, console)
    text = console.export_text()
    assert "regular-s0 failed after 8 steps: the gradient is not finite" in text and "nan" in text
    assert comparison["arms"][0]["non_finite"] == 7
