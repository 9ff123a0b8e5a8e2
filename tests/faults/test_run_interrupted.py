"""A run that is interrupted at any phase and resumed is, byte for byte, the run that was not interrupted."""

import os
import random
import signal
import time
from collections.abc import Callable

import pytest

from experiments import arms, checkpoints, delivery, rollouts, tracking
from tests.faults import local
from tests.faults.local import LocalPool, LocalTrainer
from trainer import checkpoint

pytestmark = pytest.mark.faults

# Phase: what is called there, and the number of the call (from 0) at which the run ends.
PHASES: dict[str, tuple[object, str, int]] = {
    "loading": (LocalPool, "start", 0),
    "first handoff": (LocalPool, "update_weights", 0),
    "evaluation": (LocalPool, "generate", 0),
    "first sampling": (LocalPool, "generate", 1),
    "sampling": (LocalPool, "generate", 4),
    "writing a rollout": (rollouts, "save_file", 3),
    "training": (LocalTrainer, "train", 3),
    "export": (LocalTrainer, "share", 4),
    "handoff": (LocalPool, "update_weights", 4),
    "recording a handoff": (delivery, "record_handoff", 4),
    "writing metrics": (tracking, "write_line", 3),
    "before a checkpoint": (checkpoints, "save", 1),
    "writing a checkpoint": (checkpoint, "_digest", 3),
    "renaming a checkpoint": (checkpoint, "_replace", 1),
    "pointing at a checkpoint": (os, "replace", 0),
    "pruning checkpoints": (checkpoint, "prune", 2),
    "last evaluation": (LocalPool, "generate", 6),
    "exporting the model": (LocalTrainer, "save_hf", 0),
    "writing the manifest": (arms, "write_manifest", 0),
}


@pytest.fixture(scope="module")
def uninterrupted(models, tmp_path_factory):
    """By staleness: what a run leaves, and the prompts that it trained on."""
    found = {}
    for staleness in (0, 2):
        with pytest.MonkeyPatch.context() as patch:
            local.in_process(patch)
            config = local.settings(models, tmp_path_factory.mktemp("whole"), max_staleness=staleness)
            folder, said = local.run(config)
        assert not any("FAILED" in line for line in said), said
        found[staleness] = local.evidence(folder), local.prompts_trained(folder)
    assert found[0][0]["metrics"] != found[2][0]["metrics"]
    return found


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("phase", PHASES)
def test_killed_at_a_phase(phase, staleness, models, uninterrupted, tmp_path, monkeypatch):
    """SIGKILL: nothing is unwound, closed or flushed."""
    local.in_process(monkeypatch)
    config = local.settings(models, tmp_path, max_staleness=staleness)
    ended = in_child(lambda: die_at(phase, lambda: os.kill(os.getpid(), signal.SIGKILL), config))
    assert ended == -signal.SIGKILL
    require_equal(config, uninterrupted)


@pytest.mark.parametrize("phase", PHASES)
def test_interrupted_at_a_phase(phase, models, uninterrupted, tmp_path, monkeypatch):
    """SIGINT and SIGTERM: both are raised as KeyboardInterrupt, and what was open is closed and listed."""
    local.in_process(monkeypatch)
    config = local.settings(models, tmp_path)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        die_at(phase, interrupt, config)
    require_equal(config, uninterrupted)


@pytest.mark.parametrize("trial", range(6))
def test_killed_at_a_random_moment_again_and_again(trial, models, uninterrupted, tmp_path, monkeypatch):
    local.in_process(monkeypatch)
    changes = {"max_staleness": 2 * (trial % 2)}
    config, rng = local.settings(models, tmp_path, **changes), random.Random(trial)
    started = time.perf_counter()
    assert in_child(lambda: local.run(local.settings(models, tmp_path / "timed", **changes))) == 0
    whole = time.perf_counter() - started
    kills = sum(
        in_child(lambda: local.run(config), kill_after=rng.uniform(0.1, 0.6) * whole) == -signal.SIGKILL
        for _ in range(3)
    )  # fmt: skip
    assert kills, "every run ended before it could be killed"
    require_equal(config, uninterrupted)


def require_equal(config, uninterrupted) -> None:
    """Resume and compare; every prompt was trained on once, in order, and no part of a file is left."""
    evidence, prompts = uninterrupted[config.max_staleness]
    folder, said = local.run(config)
    assert not any("FAILED" in line for line in said), said
    assert local.evidence(folder) == evidence
    assert local.prompts_trained(folder) == prompts == sorted(set(prompts))
    assert not [path for path in folder.rglob("*") if path.suffix in (".part", ".partial", ".old")]
    assert {path.name for path in (folder / "checkpoints").glob("step-*")} == {"step-000004", "step-000005"}


def die_at(phase: str, action: Callable[[], None], config) -> None:
    where, name, number = PHASES[phase]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, local.at_call(number, action, getattr(where, name)))
        local.run(config)


def in_child(work: Callable[[], object], kill_after: float | None = None) -> int:
    """Exit code of a forked process that does `work`: minus the signal where one killed it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
