"""Nothing of ours is unpickled, no secret is written down, and names cannot lead out of the output folder."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from experiments.config import ExperimentConfig, dump, load, save
from experiments.tracking import Tracker
from miles_ext.api_key import VARIABLE
from miles_ext.errors import CapabilityError
from rollout.config import RolloutConfig
from rollout.sglang_engine.config import SglangConfig
from rollout.sglang_engine.engine import require_guarded
from rollout.sglang_engine.launch import command

ROOT = Path(__file__).parents[1]
SHIPPED = [file for name in ("miles_ext", "rollout", "trainer", "experiments") for file in (ROOT / name).rglob("*.py")]
PICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
ALLOWED = {
    # What sglang's own route for tensors takes; to loopback or with an API key alone (require_guarded).
    "rollout/sglang_engine/weights.py": {"pickle"},
}
CANARY = "c0ffee5ec4e7" * 3 + "abcd"  # forty hexadecimal digits, as W&B's keys have


def unsafe(source: str) -> set[str]:
    """Picklers that are imported, and loads that would unpickle."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names} & PICKLERS
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").split(".")[0]} & PICKLERS
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            words = {word.arg: ast.unparse(word.value) for word in node.keywords}
            called = ast.unparse(node.func)
            if called == "torch.load" and words.get("weights_only") != "True":
                found.add("torch.load")
            if words.get("allow_pickle", "False") != "False" or words.get("weights_only", "True") != "True":
                found.add("allow_pickle")
            if called in ("pd.read_pickle", "pandas.read_pickle", "yaml.unsafe_load", "yaml.full_load"):
                found.add(called)
    return found


def test_no_module_unpickles() -> None:
    assert len(SHIPPED) > 100
    found = {str(file.relative_to(ROOT)): unsafe(file.read_text()) for file in SHIPPED}
    assert {name: words for name, words in found.items() if words} == ALLOWED


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from dill import loads", "import torch\ntorch.load('x')", "torch.load(f, weights_only=False)",
        "np.load(f, allow_pickle=True)", "import yaml\nyaml.unsafe_load(x)", "x.load(f, weights_only=flag)",
    ],
)  # fmt: skip
def test_the_search_for_picklers_finds_them(source: str) -> None:
    assert unsafe(source)


def test_pickled_tensors_go_to_loopback_or_with_a_key_alone() -> None:
    for url in ("http://10.0.0.7:30000", "http://node-3:30000"):
        with pytest.raises(CapabilityError, match="sglang unpickles whatever reaches that route"):
            require_guarded(url, "tensor", "")
        require_guarded(url, "tensor", "key")
        require_guarded(url, "disk", "")
    require_guarded("http://127.0.0.1:30000", "tensor", "")
    require_guarded("http://[::1]:30000", "tensor", "")


def test_secrets_of_the_environment_are_in_no_artifact_and_no_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """W&B offline in earnest, the resolved settings, and the command line of a server."""
    secrets = {"WANDB_API_KEY": CANARY, VARIABLE: CANARY[::-1], "HF_TOKEN": f"hf_{CANARY}"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    config = save(load(ROOT / "experiments/configs/quickstart.yaml", [("output_dir", str(tmp_path))]))
    tracker = Tracker(
        config.run_dir / "a-s0", experiment=config.name, arm="a", seed=0, config=config.model_dump(mode="json"),
        wandb_mode="offline",
    )  # fmt: skip
    tracker.log(0, {"train/loss": 1.0})
    tracker.finish()
    line = command(RolloutConfig(engine="sglang"), "regular", Path("target"), None, 30000)
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert any(file.suffix == ".wandb" for file in written) and (config.run_dir / "config.yaml") in written
    said = capfd.readouterr()
    texts = [file.read_bytes() for file in written] + [text.encode() for text in (said.out, said.err, *line)]
    for secret in secrets.values():
        assert not [text for text in texts if secret.encode() in text]
    assert "quickstart" in b"".join(texts).decode(errors="replace"), "the search would find what is there"


@pytest.mark.parametrize("name", ["..", ".", "../x", "a/b", "/etc", "a\\b", "", ".hidden", "a b", "a:b"])
def test_names_are_folders_and_no_paths(name: str) -> None:
    arms: list[Any] = [{"name": "a", "kind": "regular"}]
    for settings in ({"name": name, "arms": arms}, {"name": "x", "arms": [{"name": name, "kind": "regular"}]}):
        with pytest.raises(ValueError, match="can be a folder"):
            ExperimentConfig.model_validate(settings)


def test_a_run_folder_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "runs").mkdir()
    for target in (elsewhere, tmp_path / "missing"):
        link = tmp_path / "runs" / "x"
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        settings = {"name": "x", "output_dir": tmp_path / "runs", "arms": [{"name": "a", "kind": "regular"}]}
        with pytest.raises(ValueError, match="is a link to"):
            save(ExperimentConfig.model_validate(settings))
    assert not list(elsewhere.iterdir()) and not (tmp_path / "missing").exists()


def test_settings_hold_no_secret_and_dump_what_they_hold() -> None:
    config = load(ROOT / "experiments/configs/quickstart.yaml")
    with pytest.raises(ValueError, match="look like secrets"):
        SglangConfig(environment={"HF_TOKEN": CANARY})
    assert "api_key_file: null" in dump(config)
