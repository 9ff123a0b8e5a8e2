"""What a person gets wrong: one clear line, an exit code that is not 0, no traceback, finished work kept."""

import json
import shutil
import socket
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from experiments.__main__ import main
from rollout.config import RolloutConfig
from rollout.worker import RolloutWorker
from tests.experiments.cli import SMALL, call, manifest, nothing_left_behind

QUICKSTART = Path("experiments/configs/quickstart.yaml")
TINY = Path("experiments/models/tiny")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "nowhere.yaml"], ["no file nowhere.yaml", "experiments/configs/"]),
        (["run", "Makefile"], ["Makefile", "YAML"]),
        (["run", QUICKSTART, "--trainer.lrr", "1"], ["trainer.lrr", "did you mean trainer.lr?"]),
        (["run", QUICKSTART, "--sampling.top_p", "1.5"], ["top_p is 1.5", "0 < top_p <= 1"]),
        (["run", QUICKSTART, "--sampling.temperature", "-0.5"], ["temperature is -0.5", "finite and >= 0"]),
        (["run", QUICKSTART, "--model.target", "no/model"], ["model.target is no/model", "models make"]),
        (["submit", QUICKSTART, "--model.draft", "no/draft"], ["model.draft is no/draft", "models make"]),
        (["submit", Path("/dev/null")], ["no file /dev/null"]),
        (["audit", "no/run"], ["no/run"]),
        (["report", "no/run"], ["no/run"]),
        (["validate", "nothing"], ["nothing", "filters"]),
    ],
    ids=lambda value: " ".join(map(str, value))[:40],
)
def test_one_line_names_the_value_and_the_mend(arguments, words, capsys):
    assert main([str(argument) for argument in arguments]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: ") and line.count("\n") == 1
    assert all(word in line for word in words), line


def test_a_settings_file_that_would_not_travel_with_the_job_is_refused(tmp_path, capsys):
    file = Path(shutil.copy(QUICKSTART, tmp_path))
    assert main(["submit", str(file)]) == 2
    line = capsys.readouterr().err
    assert f"{file} is outside {Path.cwd()}" in line and line.count("\n") == 1


def test_a_busy_port_is_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        done = call("submit", QUICKSTART, "--port", port)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"port {port} on 127.0.0.1 is busy" in done.stderr and "pass another --port" in done.stderr


def test_an_address_where_no_ray_answers_is_named_soon():
    started = time.monotonic()
    done = call("submit", QUICKSTART, "--address", "http://127.0.0.1:9")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "no Ray Jobs API at http://127.0.0.1:9" in done.stderr and "leave --address out" in done.stderr
    assert time.monotonic() - started < 60


def test_a_ray_address_where_nothing_listens_is_named_soon(tmp_path):
    done = call("run", QUICKSTART, "--output_dir", tmp_path, RAY_ADDRESS="127.0.0.1:9")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "no Ray cluster at RAY_ADDRESS=127.0.0.1:9" in done.stderr and "correct or unset it" in done.stderr
    assert not list(tmp_path.iterdir()), "no run began"


@pytest.mark.ray
def test_a_cluster_that_is_too_small_is_refused_not_waited_for(tmp_path):
    with nothing_left_behind():
        done = call("run", QUICKSTART, "--trainer.gpus_per_worker", "1", "--output_dir", tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "error: an arm needs 1 GPU and the cluster has 0; add nodes, or lower" in done.stderr


def unfit_drafts(folder: Path) -> dict[str, Path]:
    """Copies of the shipped draft, each broken in one way."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(TINY / "draft", folder / name))

    def edit(draft: Path, change) -> Path:
        config = json.loads((draft / "config.json").read_text())
        change(config)
        (draft / "config.json").write_text(json.dumps(config))
        return draft

    made = {
        "wrong hidden size": edit(copy("hidden"), lambda c: c.update(hidden_size=96)),
        "wrong vocabulary": edit(copy("vocabulary"), lambda c: c.update(vocab_size=300)),
        "tap layer outside": edit(copy("taps"), lambda c: c["dflash_config"].update(target_layer_ids=[0, 3, 6, 40])),
        "missing weights": copy("weights"),
    }
    weights = made["missing weights"] / "model.safetensors"
    tensors = load_file(weights)
    tensors.popitem()
    save_file(tensors, weights)
    return made


@pytest.mark.ray
def test_a_draft_that_does_not_fit_fails_its_arm_and_the_others_work_is_kept(tmp_path):
    drafts = unfit_drafts(tmp_path)
    arms = [{"name": "regular", "kind": "regular"}, {"name": "unfit", "kind": "dflash2"}]
    with nothing_left_behind():
        done = call(
            "run", QUICKSTART, "--arms", json.dumps(arms), "--model.draft", drafts["wrong vocabulary"], "--steps", "1",
            "--name", "kept", "--output_dir", tmp_path, "--wandb_mode", "disabled", *SMALL,
        )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "arm unfit-s0 FAILED: " in done.stdout and "300" in done.stdout
    assert manifest(tmp_path / "kept" / "regular-s0")["failure"] == ""
    assert "300" in manifest(tmp_path / "kept" / "unfit-s0")["failure"]
    comparison = json.loads((tmp_path / "kept" / "comparison.json").read_text())
    assert {arm["name"]: arm["state"] for arm in comparison["arms"]} == {"regular-s0": "finished", "unfit-s0": "failed"}
    assert (tmp_path / "kept" / "report.html").stat().st_size > 1000


@pytest.mark.parametrize("broken", ["wrong hidden size", "wrong vocabulary", "tap layer outside", "missing weights"])
def test_every_way_a_draft_can_misfit_is_named_with_its_mend(broken, tmp_path):
    draft = unfit_drafts(tmp_path)[broken]
    worker = RolloutWorker(RolloutConfig(context_length=64), "dflash2", TINY / "target", draft, "worker-0")
    with pytest.raises(ValueError) as caught:
        worker.start()
    removed = set(load_file(TINY / "draft" / "model.safetensors")) - set(load_file(draft / "model.safetensors"))
    sign = {"wrong hidden size": "hidden", "wrong vocabulary": "300", "tap layer outside": "40"}.get(broken)
    assert (sign or removed.pop()) in str(caught.value)
