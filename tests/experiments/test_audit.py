"""Audits of a real run, and of copies of it in which one thing was tampered with."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from experiments.artifacts import HANDOFF_FILE, verify_manifest, write_manifest
from experiments.audit import audit, audit_rows
from experiments.rollouts import load_rollout, rollout_file, save_rollout
from tests.experiments.real_run import make_run
from trainer import step


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("real"))


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "exp"))


def red(run: Path) -> set[str]:
    return {row.name for row in audit_rows(run) if not row.passed}


def test_a_finished_run_passes_and_says_so(run, capsys):
    assert audit(run) == 0
    assert "gated rows pass" in capsys.readouterr().out
    rows = json.loads((run / "dflash2-s0" / "audit.json").read_text())["rows"]
    by_name = {row["name"].split("/", 1)[1]: row for row in rows}
    assert all(row["pass"] for row in rows)
    assert by_name["gradient/centered"]["value"] < 1e-6 < 1e-2 < by_name["gradient/control_uncentered"]["value"]
    assert "DRAFT" in by_name["metadata"]["detail"] and by_name["metadata"]["value"] == 576
    verify_manifest(run / "dflash2-s0")  # the audit itself is no change


def test_a_changed_file_is_noticed(run, capsys):
    metrics = run / "regular-s0" / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 3}\n')
    assert red(run) == {"regular-s0/manifest"}
    assert audit(run) == 1


def change_rollout(arm: Path, step: int, change: Callable) -> None:
    """Rewrite one rollout with `change(completion)` applied to its first trajectory, and the manifest with it."""
    file = rollout_file(arm, step)
    rollout = load_rollout(file)
    first = rollout.trajectories[0]
    rollout.trajectories[0] = dataclasses.replace(first, completion=change(first.completion))
    save_rollout(file, step, rollout.trajectories, rollout.advantages)
    write_manifest(arm)


def shift_rows(completion):
    """Every row one token late, which keeps every row a sound law."""
    rows = completion.support
    parts = [rows[1:], rows[:1]]
    return dataclasses.replace(completion, support=type(rows).concatenate(parts))


def edit(name: str, index: int, value: float) -> Callable:
    def change(completion):
        array = getattr(completion, name).copy()
        array[index] = value
        return dataclasses.replace(completion, **{name: array})

    return change


def scale_support(completion):
    rows = dataclasses.replace(completion.support, logprobs=completion.support.logprobs + np.float32(1e-3))
    return dataclasses.replace(completion, support=rows)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (shift_rows, "sampled logprob differs|not in its support"),
        (scale_support, "mass is not 1"),
        (edit("commit", 0, 1), "first \\[1\\]"),
        (edit("commit", 3, 4), "commit kinds"),
        (edit("weight_version", 2, 7), "weight versions"),
        (lambda completion: dataclasses.replace(completion, draft_digest="0" * 32), "draft digest"),
    ],
    ids=["rows one late", "mass", "first commit", "commit kind", "version", "draft"],
)
def test_bad_metadata_is_noticed(run, change, reason):
    change_rollout(run / "dflash2-s0", 2, change)
    found = [row for row in audit_rows(run) if not row.passed]
    assert [row.name for row in found] == ["dflash2-s0/metadata"]
    assert "step 2 trajectory 0" in found[0].detail
    assert re.search(reason, found[0].detail)


def test_other_prompts_break_the_pairing(run):
    change_rollout(run / "dflash2-s0", 0, edit("prompt_ids", 1, 5))
    assert red(run) == {"pairing"}


@pytest.mark.parametrize(("name", "row"), [("received_digest", "handoffs"), ("draft_digest", "handoffs")])
def test_a_handoff_that_does_not_add_up_is_noticed(run, name, row):
    file = run / "dflash2-s0" / HANDOFF_FILE
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[1]["reports"][0][name] = "0" * 32
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_manifest(file.parent)
    assert red(run) == {f"dflash2-s0/{row}"}


def test_weights_that_never_change_are_noticed(run):
    file = run / "regular-s0" / HANDOFF_FILE
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line["sent_digest"] = line["reports"][0]["received_digest"] = "0" * 32
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_manifest(file.parent)
    assert red(run) == {"regular-s0/handoffs/new_weights"}


def change_probe(arm: Path, change: Callable) -> None:
    file = arm / "audit" / "probe.safetensors"
    with safe_open(file, "numpy") as opened:
        about, arrays = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    change(arrays, about)
    save_file(arrays, file, about)
    write_manifest(arm)


def test_a_gradient_that_is_not_the_centred_one_is_noticed(run):
    def tamper(arrays, about):
        arrays["logit_grad"][5] += 1e-4 * np.abs(arrays["logit_grad"]).max()

    change_probe(run / "regular-s0", tamper)
    assert red(run) == {"regular-s0/gradient/centered"}


def test_rows_read_one_late_are_noticed(run):
    def tamper(arrays, about):
        arrays["token"] = np.where(arrays["token"] > 0, arrays["token"] - 1, arrays["token"])

    change_probe(run / "regular-s0", tamper)
    assert "regular-s0/gradient/centered" in red(run)


def test_a_trainer_that_left_centering_out_is_noticed(tmp_path):
    """The claim is centring, what ran was not: the settings differ, the gradient does, and so does the norm's claim."""
    run = make_run(tmp_path, trainer={"lr": 1e-2, "estimator": {"centering": "off"}})
    assert red(run) == set(), "an arm that claims no centring is sound"
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("centering: 'off'", "centering: 'on'"))
    assert red(run) == {
        f"{arm}/{row}" for arm in ("regular-s0", "dflash2-s0") for row in ("settings", "correction_norm")
    }  # fmt: skip


def test_a_trainer_that_reads_the_wrong_rows_is_noticed(tmp_path, monkeypatch):
    """The centred gradient of complete supports does not depend on the trainer's logits: only the gap tells."""
    make_batch = step.make_batch

    def late(*arguments):
        batch = make_batch(*arguments)
        return dataclasses.replace(batch, rows=np.maximum(batch.rows - 1, 0))

    monkeypatch.setattr(step, "make_batch", late)
    found = red(make_run(tmp_path))
    assert {"regular-s0/logprob_gap", "dflash2-s0/logprob_gap"} <= found


def test_missing_artifacts_are_red_rows_not_crashes(run):
    arm = run / "regular-s0"
    shutil.rmtree(arm / "audit")
    (arm / HANDOFF_FILE).unlink()
    write_manifest(arm, failure="stopped early")
    found = {row.name: row for row in audit_rows(run)}
    assert not found["regular-s0/finished"].passed and not found["regular-s0/handoffs"].passed
    assert "too short to reach the step" in found["regular-s0/gradient"].detail
