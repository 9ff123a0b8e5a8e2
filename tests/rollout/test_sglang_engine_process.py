"""Starting, owning and ending a server, and one clear message for everything that keeps it from starting."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from miles_ext.capability import ArmKind
from miles_ext.errors import CapabilityError, CheckpointError, EngineError, RequestError
from rollout.config import RolloutConfig
from rollout.server.running import bind
from rollout.sglang_engine import leash
from rollout.sglang_engine.drafts import draft_for
from rollout.sglang_engine.engine import SglangEngine, eos_ids
from rollout.sglang_engine.launch import command, environment, reserve_port
from rollout.worker import RolloutWorker
from tests.rollout.served import ROOT, TINY, request
from tests.rollout.stand_in_sglang import DEAF_CHILD, DIES, HANGS, config, install

OWNER = """
import os, sys, time
from pathlib import Path
from rollout.sglang_engine.process import ServerProcess
server = ServerProcess([sys.executable, "-c", sys.argv[2]], dict(os.environ), Path(sys.argv[1]))
time.sleep(300)
"""


def open_engine(settings: RolloutConfig, arm: Any = "regular", target: Path = TINY / "target") -> SglangEngine:
    return SglangEngine(settings, arm, target, TINY / "draft", "worker-0")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def children(pid: int) -> list[int]:
    found = [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found + [below for one in found for below in children(one)]


def soon(holds: Any, seconds: float = 40.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()


def test_a_worker_starts_serves_and_ends_its_server(tmp_path: Path) -> None:
    before = children(os.getpid())
    work = tmp_path / "work"
    work.mkdir()
    settings = config(install(tmp_path / "env"), folder=work)
    worker = RolloutWorker(settings, "dflash2", TINY / "target", TINY / "draft", "worker-5")
    (report,) = worker.start()
    assert (report.arm, report.engine_id) == ("dflash2", "worker-5")
    (made,) = worker.generate([request()])
    assert made.finish_reason == "stop" and made.engine_id == "worker-5" and worker.healthy()
    mine = set(children(os.getpid())) - set(before)
    assert len(mine) >= 2 and len(list(work.iterdir())) == 1
    worker.close()
    assert not [pid for pid in mine if alive(pid)] and list(work.iterdir()) == []
    worker.close()


def test_a_server_does_not_outlive_a_worker_that_is_killed(tmp_path: Path) -> None:
    """Nothing of it, though a process of its group ignores SIGTERM; and no file either."""
    work = tmp_path / "work"
    work.mkdir()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(work), DEAF_CHILD], env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    log = work / "server.log"
    assert soon(lambda: log.exists() and "deaf" in log.read_text())
    started = children(owner.pid)
    assert len(started) == 3  # the leash, the server, its deaf child
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert soon(lambda: not any(map(alive, started)))
    assert soon(lambda: not work.exists())


def test_a_server_does_not_outlive_its_leash(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, leash.__file__, str(tmp_path), sys.executable, "-c", "import time; time.sleep(300)"],
        stdin=subprocess.PIPE,
    )
    assert soon(lambda: len(children(holder.pid)) == 1)
    (server,) = children(holder.pid)
    holder.kill()
    holder.wait()
    assert soon(lambda: not alive(server))


def test_a_server_that_dies_shows_its_last_lines(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    with pytest.raises(EngineError) as caught:
        open_engine(config(install(tmp_path / "env", DIES), folder=work))
    message = str(caught.value)
    assert "died while it started (exit 3)" in message and message.endswith("line 59\nRuntimeError: out of memory")
    assert "line 0\n" not in message and len(message.splitlines()) == 41
    assert list(work.iterdir()) == []


def test_a_server_that_never_decodes_is_given_up(tmp_path: Path) -> None:
    before = children(os.getpid())
    with pytest.raises(EngineError, match="start_timeout_s = 1.0 s; the end of its log:\nloading"):
        open_engine(config(install(tmp_path, HANGS), start_timeout_s=1.0))
    assert children(os.getpid()) == before


@pytest.mark.parametrize(
    ("python", "words"),
    [
        ("/nowhere/python", "does not run: No such file or directory"),
        ("/bin/false", "is no working Python"),
        (sys.executable, "there is no sglang; accepted: 0.5.23"),
    ],
)
def test_an_interpreter_without_sglang(python: str, words: str) -> None:
    with pytest.raises(CapabilityError, match=words):
        open_engine(config({}, python=python))


def test_another_sglang_and_a_missing_plugin(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match="there is sglang 0.5.22; accepted: 0.5.23"):
        open_engine(config(install(tmp_path / "a", version="0.5.22")))
    with pytest.raises(CapabilityError, match=r"\['other'\] and not miles_sc.* -m pip install --no-deps -e \."):
        open_engine(config(install(tmp_path / "b", plugin="other")))


def test_a_draft_for_another_target(tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(TINY / "target", target)
    raw = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(raw | {"hidden_size": 128, "num_hidden_layers": 6}))
    with pytest.raises(CheckpointError) as caught:
        open_engine(config(install(tmp_path / "env")), "dflash2", target)
    for words in (
        "hidden_size 64 differs from the target's 128",
        "num_target_layers 10",
        "not all below 5: sglang shows",
    ):
        assert words in str(caught.value)


def test_arms_and_drafts(tmp_path: Path) -> None:
    target, draft = TINY / "target", TINY / "draft"
    assert draft_for("regular", target, None, tmp_path) is None
    assert draft_for("dflash2", target, draft, tmp_path) == draft.absolute()
    plain = draft_for("dflash", target, draft, tmp_path)
    assert plain is not None
    settings = json.loads((plain / "config.json").read_text())
    assert settings["architectures"] == ["DFlashDraftModel"] and "selector_rank" not in settings["dflash_config"]
    assert {path.name for path in plain.iterdir()} == {path.name for path in draft.iterdir()}
    assert draft_for("dflash", target, plain, tmp_path) == plain
    refused: tuple[tuple[ArmKind, Path | None, str], ...] = (
        ("dflash2", plain, "needs a path selector"),
        ("dflash", None, "needs a draft checkpoint"),
        ("dflash", target, "is no DFlash draft"),
        ("dflash", tmp_path, "config.json does not exist"),
    )
    for arm, folder, words in refused:
        with pytest.raises(CheckpointError, match=words):
            draft_for(arm, target, folder, tmp_path)


def test_a_reserved_port_is_kept_for_a_server() -> None:
    with reserve_port(None) as reserved, socket.socket() as other:
        port = reserved.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with pytest.raises(ValueError, match=f"every port of rollout.sglang.ports = \\({port}, {port}\\)"):
            reserve_port((port, port))
        with bind("127.0.0.1", port) as server:
            assert server.getsockname()[1] == port
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with reserve_port((port, port + 50)) as next_one:
            assert port < next_one.getsockname()[1] <= port + 50


def test_the_command_is_exact() -> None:
    sglang = {"python": "py", "args": ["--enable-metrics"], "mem_fraction": 0.5, "deterministic": True, "tp_size": 2}
    settings = RolloutConfig.model_validate({"device": "cpu", "dtype": "bfloat16", "sglang": sglang})
    line = command(settings, "dflash", Path("/t"), Path("/d"), 7)
    assert line[:3] == [str(Path("py").absolute()), "-m", "sglang.launch_server"]
    pairs = dict(zip(line[3:-2:2], line[4:-2:2], strict=True))
    assert line[-2:] == ["--enable-deterministic-inference", "--enable-metrics"]
    assert pairs == {
        "--model-path": "/t", "--host": "127.0.0.1", "--port": "7", "--weight-version": "0", "--dtype": "bfloat16",
        "--context-length": "512", "--max-running-requests": "128", "--sampling-mask-max-tokens": "4096",
        "--tp-size": "2", "--device": "cpu", "--mem-fraction-static": "0.5", "--speculative-algorithm": "DFLASH",
        "--speculative-draft-model-path": "/d", "--speculative-accept-threshold-single": "1.0",
        "--speculative-accept-threshold-acc": "1.0",
    }  # fmt: skip


def test_the_environment_is_the_servers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/this/interpreter")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    settings = RolloutConfig.model_validate({"sglang": {"environment": {"A": "b"}, "filter_order": "joint"}})
    found = environment(settings, "worker-2")
    assert "PYTHONPATH" not in found and (found["CUDA_VISIBLE_DEVICES"], found["A"]) == ("3", "b")
    assert {name: value for name, value in found.items() if name.startswith("MILES_SC")} == {
        "MILES_SC_FILTER_ORDER": "joint", "MILES_SC_STRICT": "1", "MILES_SC_ENGINE_ID": "worker-2"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sglang": {"args": ["--speculative-accept-threshold-acc=0.9"]}}, "threshold-acc set by the engine itself"),
        ({"sglang": {"ports": [9, 8]}}, "1 <= first <= last"),
        ({"sglang": {"pyhton": "x"}}, "Extra inputs"),
        ({"sglang": {"urls": ["http://a"]}, "workers": 2}, "1 sglang.urls for 2 workers"),
        ({"engine": "sglang", "dtype": "float64"}, "float64 beside engine sglang"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RolloutConfig.model_validate(settings)


def test_seeds_settle_nothing_where_drafts_are_verified() -> None:
    with pytest.raises(RequestError, match="beside arm 'dflash2'"):
        open_engine(config({}, deterministic=True), "dflash2")


def test_test_verifiers_are_allowed_by_the_switch_alone() -> None:
    for settings, allowed in (
        ({"engine": "sglang"}, False),
        ({"engine": "sglang", "sglang": {"allow_test_verifier": True}}, True),
        ({"engine": "embedded", "sglang": {"allow_test_verifier": True}}, False),
    ):
        assert RolloutConfig.model_validate(settings).accepts_test_verifier is allowed


def test_end_tokens_of_a_checkpoint(tmp_path: Path) -> None:
    assert eos_ids(TINY / "target") == {15}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 1}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert eos_ids(tmp_path) == {1, 2}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").unlink()
    assert eos_ids(tmp_path) == frozenset()
