"""Real rollout workers into which a fault can be put: the engine, its process and Ray are what is shipped."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from miles_ext.capability import ArmKind, EngineCapability
from miles_ext.records import Completion
from miles_ext.sampling import SamplingSpec
from miles_ext.tensors import entries, to_array
from miles_ext.weights import HandoffReport, WeightManifest
from rollout.config import RolloutConfig
from rollout.embedded.decoder import Decoder
from rollout.embedded.engine import EmbeddedEngine
from rollout.engine import Request
from rollout.pool import RolloutPool
from rollout.worker import RolloutWorker

STEPS = 3  # decoded before a fault in the middle of a batch strikes
FAULTS, PROCESSES = "faults", "processes"  # folders beside the target's


class Faulty(RolloutWorker):
    """`inject` puts a fault into the next call that it concerns; a file FAULTS/<engine id> one into the next start."""

    fault = ""

    def inject(self, fault: str) -> None:
        self.fault = fault

    def start(self) -> list[EngineCapability]:
        (self._target.with_name(PROCESSES) / str(os.getpid())).touch()
        file = self._target.with_name(FAULTS) / self._engine_id
        if file.exists():
            self.fault = file.read_text()
            if not self.fault.startswith("always "):
                file.unlink()
            self.fault = self.fault.removeprefix("always ")
        if self._strikes("slow start"):
            time.sleep(4)
        if self._strikes("no start"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._strikes("hung start"):
            time.sleep(600)
        return super().start()

    def healthy(self) -> bool:
        if self._strikes("hung probe"):
            time.sleep(600)
        return not self._strikes("sick") and super().healthy()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        if self._strikes("hang"):
            self._after_steps(lambda: time.sleep(600), inside=True)
        if self._strikes("freeze"):
            self._after_steps(lambda: os.kill(os.getpid(), signal.SIGSTOP))
        if self._strikes("die"):
            self._after_steps(lambda: os.kill(os.getpid(), signal.SIGKILL))
        found = super().generate(requests)
        if self._strikes("twice"):
            return [*found, found[0]]
        if self._strikes("wrong name"):
            return [replace(found[0], request_id="another"), *found[1:]]
        if self._strikes("stale"):
            return [replace(one, weight_version=one.weight_version - 1) for one in found]
        if self._strikes("other draft"):
            return [replace(one, draft_digest="0" * 32) for one in found]
        return found

    def update_weights(self, manifest: WeightManifest, buckets: Sequence[ray.ObjectRef]) -> HandoffReport:
        if self._strikes("die in a handoff"):
            threading.Thread(target=self._die_when_fetched, daemon=True).start()
        if self._strikes("hang in a handoff"):
            time.sleep(600)
        if self._strikes("flip a draft bit") and self.embedded.draft is not None:
            next(iter(self.embedded.draft.private_tensors().values())).view(-1)[0] += 1
        report = super().update_weights(manifest, buckets)
        return replace(report, resident_digest="0" * 32) if self._strikes("other bytes") else report

    @property
    def embedded(self) -> EmbeddedEngine:
        assert isinstance(self.engine, EmbeddedEngine)
        return self.engine

    def _strikes(self, fault: str) -> bool:
        if self.fault != fault:
            return False
        self.fault = ""
        return True

    def _after_steps(self, strike: Callable[[], Any], inside: bool = False) -> None:
        """Strike when the batch has gone STEPS steps: in the engine's own thread, or from beside it."""
        engine, begun = self.embedded, self.embedded.progress
        advance = engine.start

        def start(requests: Sequence[Request]) -> Any:
            session = advance(requests)
            step = session.advance

            def counted() -> bool:
                if engine.progress >= begun + STEPS:
                    strike()
                    if not inside:
                        time.sleep(600)  # the signal comes at once, but not before the next line
                return step()

            session.advance = counted
            return session

        engine.start = start

    def _die_when_fetched(self) -> None:
        while not self._fetched:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)


def settings(**changes: Any) -> RolloutConfig:
    """Patience of seconds where runs have minutes; budgets that one test does not use up."""
    base: dict[str, Any] = {
        "workers": 2, "cpus_per_worker": 0.25, "context_length": 64, "max_concurrency": 8, "request_timeout_s": 6.0,
        "heartbeat_timeout_s": 6.0, "probe_timeout_s": 30.0, "first_probe_grace_s": 60.0, "restart_backoff_s": 0.1,
        "probe_interval_s": 3600.0, "max_failures": 1000,
    }  # fmt: skip
    return RolloutConfig(**base | changes)


@contextlib.contextmanager
def pool_of(target: Path, draft: Path | None, *, start: bool = True, **changes: Any) -> Iterator[RolloutPool]:
    """A pool of faulty workers; afterwards no process of any of its workers is left."""
    for name in (FAULTS, PROCESSES):
        target.with_name(name).mkdir(exist_ok=True)
    others = len(living(target))
    arm: ArmKind = "dflash2" if draft else "regular"
    pool = RolloutPool(settings(**changes), arm, target, draft, SamplingSpec(), worker=Faulty)
    try:
        if start:
            pool.start()
        yield pool
    finally:
        pool.close()
        gone(target, left=others)


def gone(target: Path, left: int) -> None:
    """Wait until no more than `left` of all the processes that workers ever had are alive."""
    deadline = time.monotonic() + 30
    while len(living(target)) > left and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(living(target)) <= left, f"processes {living(target)} are left, accepted: {left}"


def living(target: Path) -> list[int]:
    """Processes of workers that are alive."""
    return [pid for file in target.with_name(PROCESSES).iterdir() if _is_alive(pid := int(file.name))]


def inject(pool: RolloutPool, fault: str, *workers: int) -> None:
    """Into the next call of these workers that the fault concerns."""
    ray.get([pool._members[i].actor.inject.remote(fault) for i in workers])


def at_start(target: Path, worker: int, fault: str) -> None:
    """Into the next start of a worker; `always FAULT` into all of them."""
    target.with_name(FAULTS).mkdir(exist_ok=True)
    (target.with_name(FAULTS) / f"worker-{worker}").write_text(fault)


def weights(target: Path, version: int, scale: float = 1.0) -> tuple[WeightManifest, list[ray.ObjectRef]]:
    """The target's own weights, scaled, as a handoff delivers them in two buckets."""
    tensors = {name: tensor * scale for name, tensor in Decoder.from_hf(target).named_hf_tensors()}
    names = list(tensors)
    halves = [names[: len(names) // 2], names[len(names) // 2 :]]
    buckets = [ray.put({name: to_array(tensors[name]) for name in half}) for half in halves]
    return WeightManifest(version=version, tensors=entries(tensors)), buckets


def answers(completions: Sequence[Completion]) -> list[tuple[str, list[int]]]:
    return [(one.request_id, one.response_ids.tolist()) for one in completions]


def versions(completions: Sequence[Completion]) -> set[int]:
    return set(np.concatenate([one.weight_version for one in completions]).tolist())


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
