"""One rollout worker as the pool sees it: its actor, the calls it has still to make, and what was heard of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from miles_ext.errors import EngineError, WeightError
from rollout.policy import Doing, Observation
from rollout.worker import CONTROL

FAILURES = (RayError, EngineError)
"""What does not depend on content: the worker is replaced and its requests are issued again with their own seeds."""

HEARTBEAT_S = 1.0


@dataclass(frozen=True, slots=True)
class Errand:
    """One call of a worker.

    call: actor -> reference. accept: takes the worker and its result; EngineError where that is not what was asked for.
    again: whether it is issued again after a restart. refused: takes a WeightError, which is raised without it.
    """

    doing: Doing
    call: Callable[[Any], Any]
    accept: Callable[[Member, Any], None]
    again: bool = False
    refused: Callable[[Member, WeightError], None] | None = None


class Member:
    """Makes the calls of one worker, one after another, and hears its heartbeat meanwhile.

    spawn: makes a bare actor. begin: the errands that make it fit to serve.
    """

    def __init__(self, index: int, spawn: Callable[[], Any], begin: Callable[[], list[Errand]]) -> None:
        self.index = index
        self.restarts, self.failures = 0, 0  # in all; since the last batch that it answered
        self.served = False
        self.decoded_at = 0.0
        self.error: BaseException | None = None  # the last failure
        self._spawn, self._begin = spawn, begin
        self._errands: deque[Errand] = deque()
        self._spawn_at: float | None = None
        self._enter(spawn())

    @property
    def name(self) -> str:
        return f"worker-{self.index}"

    @property
    def busy(self) -> bool:
        return self._spawn_at is not None or bool(self._errands)

    @property
    def awaited(self) -> list[Any]:
        """References that something will be heard from."""
        return [ref for ref in (self._call, self._heartbeat) if ref is not None]

    def give(self, *errands: Errand) -> None:
        """More to do after what it has."""
        self._errands.extend(errands)
        if self._call is None and self._spawn_at is None:
            self._issue()

    def poll(self, run_failures: int) -> Observation:
        """Collect what has arrived, go on to the next call, and say how the worker does."""
        now = time.monotonic()
        if self._spawn_at is not None:
            if now >= self._spawn_at:
                self._spawn_at = None
                self._enter(self._spawn())
            return Observation(doing="idle")
        doing, fresh = self._errands[0].doing, self._fresh
        try:
            self._hear(now)
            self._collect()
            self.error = None
        except FAILURES as error:
            self.error = error
        return Observation(
            doing=doing, fresh=fresh, served=self.served, failure=brief(self.error) if self.error else "",
            silent_s=now - self._heard_at, stuck_s=now - self._moved_at,
            failures=self.failures, run_failures=run_failures,
        )  # fmt: skip

    def restart(self, delay_s: float) -> None:
        """Another actor after `delay_s`, made fit, and then what this one has left undone. The old one has ended."""
        self.restarts += 1
        self.failures += 1
        self._errands = deque(errand for errand in self._errands if errand.again)
        self._call = self._heartbeat = None
        self._spawn_at = time.monotonic() + delay_s

    def forget(self) -> None:
        """Drop what it has to do; results of a call that runs are thrown away."""
        self._errands.clear()
        self._call = self._heartbeat = self._spawn_at = None

    def answered(self) -> None:
        """It served a whole batch: what it failed before is forgiven."""
        self.failures = 0
        self.decoded()

    def decoded(self) -> None:
        """It has shown that it decodes."""
        self.served, self._fresh, self.decoded_at = True, False, time.monotonic()

    def _enter(self, actor: Any) -> None:
        self.actor = actor
        self._fresh, self._progress = True, -1
        self._heartbeat: Any = None
        self._errands.extendleft(reversed(self._begin()))
        self._issue()

    def _issue(self) -> None:
        self._call: Any = self._errands[0].call(self.actor) if self._errands else None
        self._moved_at = self._heard_at = time.monotonic()

    def _hear(self, now: float) -> None:
        """Take a heartbeat that has come; ask for the next when it is time."""
        if self._heartbeat is None:
            if now - self._heard_at >= HEARTBEAT_S:
                self._heartbeat = self.actor.heartbeat.options(concurrency_group=CONTROL).remote()
        elif _is_ready(self._heartbeat):
            progress = get(self._heartbeat)
            self._heartbeat, self._heard_at = None, now
            if progress != self._progress:
                self._progress, self._moved_at = progress, now

    def _collect(self) -> None:
        """Take the result of the call where there is one, and make the next."""
        if self._call is None or not _is_ready(self._call):
            return
        errand = self._errands[0]
        try:
            errand.accept(self, get(self._call))
        except WeightError as error:
            if errand.refused is None:
                raise
            errand.refused(self, error)
        self._errands.popleft()
        self._issue()


def get(ref: Any) -> Any:
    """The result, or the worker's own exception as it was raised there."""
    try:
        return ray.get(ref)
    except RayTaskError as error:
        raise error.cause from error


def _is_ready(ref: Any) -> bool:
    return bool(ray.wait([ref], timeout=0)[0])


def brief(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
