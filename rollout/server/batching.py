"""One thread that owns the engine: it takes all that is queued, runs it as one batch, and takes again.

A request that arrives while the engine works waits for that call to end, so its latency is at most one call longer
than with admission between steps. `max_batch` bounds how many requests share a call, and with that the wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import Any

from miles_ext.errors import EngineError
from miles_ext.records import Completion
from rollout.engine import Engine, Request

log = logging.getLogger(__name__)


@dataclass
class _Job:
    """Requests to generate, or other work on the engine."""

    requests: Sequence[Request] = ()
    work: Callable[[Any], Any] | None = None
    done: Future[Any] = field(default_factory=Future)


class EngineThread:
    """Serialises an engine, which is not thread-safe, for any number of coroutines."""

    def __init__(self, engine: Engine, max_batch: int) -> None:
        self._engine, self.max_batch = engine, max_batch
        self._jobs: deque[_Job] = deque()
        self._ready = Condition()
        self._closed = False
        self.running = 0  # requests in the engine now
        self.calls = 0  # calls of the engine that returned
        self._thread = Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closed

    @property
    def queued(self) -> int:
        with self._ready:
            return sum(len(job.requests) for job in self._jobs)

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return await self._submit(_Job(requests=requests))

    async def call(self, work: Callable[[Any], Any]) -> Any:
        """`work(engine)`, between two batches."""
        return await self._submit(_Job(work=work))

    def close(self, timeout_s: float = 30.0) -> None:
        """Finish the call that runs, refuse what waits."""
        with self._ready:
            self._closed = True
            waiting, self._jobs = list(self._jobs), deque()
            self._ready.notify()
        for job in waiting:
            job.done.set_exception(EngineError("the server is shutting down; send the request to another"))
        self._thread.join(timeout_s)

    async def _submit(self, job: _Job) -> Any:
        with self._ready:
            if not self.alive:
                raise EngineError("the engine is not running; restart the server")
            self._jobs.append(job)
            self._ready.notify()
        return await asyncio.wrap_future(job.done)

    def _take(self) -> list[_Job]:
        """The next piece of other work alone, or all generation at the head of the queue, up to max_batch requests."""
        with self._ready:
            self._ready.wait_for(lambda: self._jobs or self._closed)
            taken: list[_Job] = []
            while self._jobs:
                size = sum(len(job.requests) for job in [*taken, self._jobs[0]])
                if taken and (taken[0].work or self._jobs[0].work or size > self.max_batch):
                    break
                taken.append(self._jobs.popleft())
            return taken

    def _serve(self) -> None:
        while jobs := self._take():
            jobs = [job for job in jobs if job.done.set_running_or_notify_cancel()]
            if not jobs:
                continue
            if jobs[0].work:
                self._finish(jobs[0], lambda work=jobs[0].work: work(self._engine))
            elif len(jobs) > 1:
                self._generate_together(jobs)
            else:
                self._finish(jobs[0], lambda requests=jobs[0].requests: self._run(requests))

    def _generate_together(self, jobs: list[_Job]) -> None:
        try:
            completions = iter(self._run([request for job in jobs for request in job.requests]))
        except Exception:
            # Alone, each job gets its own answer; draws depend on seeds, so the innocent ones lose nothing.
            log.exception("a batch of %d jobs failed; running them one by one", len(jobs))
            for job in jobs:
                self._finish(job, lambda requests=job.requests: self._run(requests))
            return
        for job in jobs:
            job.done.set_result([next(completions) for _ in job.requests])

    def _run(self, requests: Sequence[Request]) -> list[Completion]:
        self.running = len(requests)
        try:
            return self._engine.generate(requests)
        finally:
            self.running = 0
            self.calls += 1

    @staticmethod
    def _finish(job: _Job, work: Callable[[], Any]) -> None:
        try:
            result = work()
        except Exception as error:
            job.done.set_exception(error)
        else:
            job.done.set_result(result)
