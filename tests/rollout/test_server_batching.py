"""The engine's thread: what is queued shares a call, failures stay with their owner, closing leaves nobody waiting."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from miles_ext.errors import EngineError
from miles_ext.records import Completion
from rollout.embedded.engine import EmbeddedEngine
from rollout.engine import Request
from rollout.server.batching import EngineThread
from tests.rollout.served import PROMPT, TINY, Served, request, serving


class Gated(EmbeddedEngine):
    """The tiny engine behind a gate, which notes the size of every call; a prompt of one token fails its call."""

    def __init__(self) -> None:
        super().__init__(TINY / "target", device="cpu", max_concurrency=8, threads=1)
        self.calls: list[int] = []
        self.gate = threading.Event()
        self.entered = threading.Event()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.entered.set()
        assert self.gate.wait(30)
        self.calls.append(len(requests))
        if any(len(one.prompt_ids) == 1 for one in requests):
            raise RuntimeError("cannot")
        return super().generate(requests)

    def alone(self, one: Request) -> list[int]:
        return super().generate([one])[0].response_ids.tolist()


async def queued_behind_one(gated: Gated, thread: EngineThread, jobs: list[list[Request]]) -> list[Any]:
    """Results of `jobs`, all queued while a first call waits at the gate."""
    first = asyncio.create_task(thread.generate([request(0)]))
    await asyncio.to_thread(gated.entered.wait, 30)
    waiting = [asyncio.create_task(thread.generate(job)) for job in jobs]
    while thread.queued < sum(map(len, jobs)):
        await asyncio.sleep(0.001)
    gated.gate.set()
    await first
    return await asyncio.gather(*waiting, return_exceptions=True)


def test_queued_requests_share_a_call_and_answers_go_to_their_owners() -> None:
    gated = Gated()
    thread = EngineThread(gated, max_batch=4)
    jobs = [[request(1)], [request(2), request(3)], [request(4)], [request(5)]]
    found = asyncio.run(queued_behind_one(gated, thread, jobs))
    assert gated.calls == [1, 4, 1]  # the fifth does not fit into a batch of four
    for job, completions in zip(jobs, found, strict=True):
        for one, completion in zip(job, completions, strict=True):
            assert completion.response_ids.tolist() == gated.alone(one)
    thread.close()
    assert not thread.alive


def test_a_failing_job_does_not_fail_those_that_shared_its_call() -> None:
    gated = Gated()
    thread = EngineThread(gated, max_batch=8)
    good, bad, other = asyncio.run(
        queued_behind_one(gated, thread, [[request(1)], [request(2, prompt="1")], [request(3)]])
    )
    assert isinstance(bad, RuntimeError) and "cannot" in str(bad)
    for seed, completions in ((1, good), (3, other)):
        assert completions[0].response_ids.tolist() == gated.alone(request(seed))
    thread.close()


def test_closing_finishes_the_running_call_and_refuses_what_waits() -> None:
    gated = Gated()
    thread = EngineThread(gated, max_batch=8)

    async def scene() -> list[Any]:
        running = asyncio.create_task(thread.generate([request(0)]))
        await asyncio.to_thread(gated.entered.wait, 30)
        waiting = asyncio.create_task(thread.call(lambda engine: engine.healthy()))
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(asyncio.to_thread(thread.close))
        await asyncio.sleep(0.01)
        gated.gate.set()
        await closing
        return list(await asyncio.gather(running, waiting, thread.generate([request(1)]), return_exceptions=True))

    completed, waited, late = asyncio.run(scene())
    assert completed[0].finish_reason == "stop"
    assert isinstance(waited, EngineError) and isinstance(late, EngineError)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving("dflash2", health_timeout_s=0.2) as one:
        yield one


def test_concurrent_clients_get_their_own_answers_from_fewer_calls(served: Served) -> None:
    bodies = [{"text": PROMPT, "sampling_params": {"sampling_seed": seed, "max_new_tokens": 20}} for seed in range(16)]
    alone = [served.post("/generate", body)["output_ids"] for body in bodies]
    before = calls(served)

    async def flood() -> list[list[int]]:
        async with httpx.AsyncClient(base_url=served.client.base_url, timeout=60) as client:
            answers = await asyncio.gather(*(client.post("/generate", json=body) for body in bodies))
        return [answer.json()["output_ids"] for answer in answers]

    assert asyncio.run(flood()) == alone
    assert calls(served) - before < len(bodies)


def test_health_answers_while_the_engine_is_stuck_and_health_generate_does_not(served: Served) -> None:
    stuck, gate, generate = threading.Event(), threading.Event(), served.engine.generate

    def wait(requests: Sequence[Request]) -> list[Completion]:
        stuck.set()
        assert gate.wait(30)
        return generate(requests)

    served.engine.generate = wait
    try:
        asking = threading.Thread(target=served.post, args=("/generate", {"text": PROMPT}))
        asking.start()
        assert stuck.wait(30)
        assert served.client.get("/health").status_code == 200
        assert served.client.get("/health_generate").status_code == 503
    finally:
        gate.set()
        asking.join()
        served.engine.generate = generate
    assert served.client.get("/health_generate").status_code == 200


def calls(served: Served) -> float:
    lines = served.client.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("sc:engine_calls "))
