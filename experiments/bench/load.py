"""`bench load`: the HTTP server, then the pool, under 64 clients that ask without pause; a soak of `--seconds` each.

Every request has a name, a prompt and a seed of its own. What came back is counted against what was sent by name, and a
sample is decoded again by an engine alone: an answer that went to another client, or was made twice, would differ.
Memory is watched from the end of a warm-up, the first fifth of the time.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ray
from safetensors.torch import load_file

from experiments import cluster
from experiments.evidence import Row, at_least, at_most, report
from experiments.tasks import addition
from miles_ext.api_key import VARIABLE, headers
from miles_ext.sampling import SamplingSpec
from miles_ext.tensors import entries, to_array
from miles_ext.weights import WeightManifest
from miles_ext.wire import request_fields, unpack
from rollout.config import RolloutConfig
from rollout.embedded.engine import EmbeddedEngine
from rollout.engine import Request
from rollout.pool import RolloutPool

PAGE = Path("docs/results/load.md")
MODELS = Path(__file__).parents[1] / "models" / "tiny"
ROOT = Path(__file__).parents[2]
CLIENTS, TOKENS, SAMPLE = 64, 24, 100
SPEC = SamplingSpec(capture="head", head_size=8)
WARM_UP, GROWTH = 0.2, 0.05
START_S, ANSWER_S = 120.0, 120.0


class Ledger:
    """What was sent and has not come back, by name; of what came back only counts and a sample, lest it grow."""

    def __init__(self) -> None:
        self.pending: dict[str, Request] = {}
        self.sent = self.tokens = 0
        self.wrong: list[str] = []  # answers that nobody waits for
        self.faults: list[str] = []
        self.sample: list[tuple[Request, list[int]]] = []
        self._latencies: list[float] = []
        self._random = np.random.default_rng(0)

    def send(self, request: Request) -> None:
        self.pending[request.request_id] = request
        self.sent += 1

    def take(self, name: str, ids: list[int], seconds: float) -> None:
        request = self.pending.pop(name, None)
        if request is None:
            self.wrong.append(name)
            return
        self._latencies.append(seconds)
        self.tokens += len(ids)
        place = int(self._random.integers(len(self._latencies)))  # each answer is as likely to be in the sample
        if len(self.sample) < SAMPLE:
            self.sample.append((request, ids))
        elif place < SAMPLE:
            self.sample[place] = (request, ids)

    def rows(self, side: str, seconds: float) -> list[Row]:
        said = "; ".join([*list(self.pending)[:3], *self.faults[:3]])
        return [
            report(f"load/{side}_requests", self.sent, detail=f"{CLIENTS} clients for {seconds:.0f} s"),
            at_most(f"load/{side}_lost", len(self.pending), 0, detail=said),
            at_most(f"load/{side}_twice_or_foreign", len(self.wrong), 0, detail="; ".join(self.wrong[:3])),
            at_least(f"load/{side}_same_as_alone", self.same_as_alone(), 0.99, detail=f"of {len(self.sample)} answers"),
            report(f"load/{side}_tokens_per_s", self.tokens / seconds, "tok/s", "of a machine with other work"),
            report(f"load/{side}_latency_p50", float(np.quantile(self._latencies or [np.nan], 0.5)), "s"),
            report(f"load/{side}_latency_p99", float(np.quantile(self._latencies or [np.nan], 0.99)), "s"),
        ]

    def same_as_alone(self) -> float:
        """Share of a sample whose response an engine makes again by itself; rounding may turn a draw in a thousand."""
        engine = EmbeddedEngine(MODELS / "target", MODELS / "draft", "dflash2", device="cpu", max_concurrency=1)
        same = [engine.generate([request])[0].response_ids.tolist() == ids for request, ids in self.sample]
        return float(np.mean(same)) if same else float("nan")


class Memory:
    """Resident sizes over time, MiB."""

    def __init__(self, seconds: float) -> None:
        self.ends, self.before, self.after = time.monotonic() + WARM_UP * seconds, [0.0], [0.0]

    def note(self, size_mb: float) -> None:
        (self.before if time.monotonic() < self.ends else self.after).append(size_mb)

    def row(self, name: str) -> Row:
        """Largest size after the warm-up over the largest size in it."""
        warm, most = max(self.before), max(self.after)
        growth = most / warm - 1 if warm and most else float("nan")
        return at_most(name, growth, GROWTH, "of warm size", f"{warm:.0f} MiB warm, {most:.0f} MiB at most afterwards")


def rows(quick: bool = False, seconds: float | None = None) -> list[dict[str, Any]]:
    """Soak the server, then the pool. seconds: of each; 600, or 20 where `quick`."""
    seconds = seconds or (20.0 if quick else 600.0)
    return [row.as_json() for row in [*soak_server(seconds), *soak_pool(seconds)]]


def question(name: str, number: int) -> Request:
    """The same prompt for every 97th request, never the same seed."""
    prompt = addition.problem(0, 0, number % 97, "train").prompt
    seeded = SamplingSpec(capture="head", head_size=SPEC.head_size, seed=number)
    ids = np.array(addition.encode(prompt), np.int32)
    return Request(request_id=name, prompt_ids=ids, spec=seeded, max_new_tokens=TOKENS, stop_ids=(addition.EOS_ID,))


def soak_server(seconds: float) -> list[Row]:
    ledger, key = Ledger(), secrets.token_hex(16)
    with served(key) as (process, url):
        started, memory = time.monotonic(), Memory(seconds)
        watcher = watch(lambda: memory.note(resident_mb(process.pid)), seconds)
        asyncio.run(ask_server(url, key, ledger, started + seconds))
        took = time.monotonic() - started
        watcher.join()
        metrics = httpx.get(f"{url}/metrics", headers=headers(key), timeout=ANSWER_S).text
    counted = [line for line in metrics.splitlines() if line.startswith("sglang:num_requests_total")]
    surplus = float(counted[0].split()[1]) - ledger.sent
    return [
        *ledger.rows("http", took), memory.row("load/http_memory_growth"),
        at_most("load/http_decoded_twice", abs(surplus), 0, detail="the server's own count against what was sent"),
        at_most("load/http_left_behind", float(os.path.exists(f"/proc/{process.pid}")), 0, "processes"),
    ]  # fmt: skip


@contextmanager
def served(key: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process on a free port of loopback, and its address."""
    command = [
        sys.executable, "-m", "rollout.server", "--target", str(MODELS / "target"), "--draft", str(MODELS / "draft"),
        "--arm", "dflash2", "--port", "0", "--threads", "1", "--max-concurrency", str(CLIENTS),
    ]  # fmt: skip
    environment = {**os.environ, VARIABLE: key}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.wait(START_S)


async def ask_server(url: str, key: str, ledger: Ledger, until: float) -> None:
    limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=url, headers=headers(key), timeout=ANSWER_S, limits=limits) as http:

        async def client(mine: int) -> None:
            turn = 0
            while time.monotonic() < until:
                request = question(f"client {mine} turn {turn}", number=turn * CLIENTS + mine)
                ledger.send(request)
                started = time.monotonic()
                try:
                    name, ids = read_answer(await http.post("/generate", json=body(request)))
                    ledger.take(name, ids, time.monotonic() - started)
                except (httpx.HTTPError, ValueError) as error:
                    ledger.faults.append(f"{request.request_id}: {type(error).__name__} {error}")
                turn += 1

        await asyncio.gather(*(client(mine) for mine in range(CLIENTS)))


def body(request: Request) -> dict[str, Any]:
    return {
        "rid": request.request_id, "input_ids": request.prompt_ids.tolist(),
        "sampling_params": {
            "max_new_tokens": request.max_new_tokens, "custom_params": {"sc": request_fields(request.spec)},
        },
    }  # fmt: skip


def read_answer(answer: httpx.Response) -> tuple[str, list[int]]:
    """Name and response ids. ValueError for an answer that is none, or whose rows are not one a token."""
    if answer.status_code != 200:
        raise ValueError(f"HTTP {answer.status_code}: {answer.text[:200]}")
    found = answer.json()
    rows, _ = unpack(found["meta_info"]["sc"])
    rows.check(np.array(found["output_ids"]), vocab_size=512)
    return found["meta_info"]["id"], found["output_ids"]


def soak_pool(seconds: float) -> list[Row]:
    """Two workers, 64 threads that ask them for two responses at a time, and a handoff twenty times."""
    ledger = Ledger()
    config = RolloutConfig(workers=2, cpus_per_worker=0.5, context_length=64, max_concurrency=8)
    target, draft = MODELS / "target", MODELS / "draft"
    with cluster.session(1), closing(RolloutPool(config, "dflash2", target, draft, SPEC)) as pool:
        pool.start()
        started, workers, driver = time.monotonic(), Memory(seconds), Memory(seconds)

        def note() -> None:
            workers.note(pool.rss_mb())
            driver.note(resident_mb(os.getpid()))

        tensors = {name: one.float() for name, one in load_file(target / "model.safetensors").items()}
        manifest, buckets = entries(tensors), [ray.put({name: to_array(one) for name, one in tensors.items()})]
        with ThreadPoolExecutor(CLIENTS) as clients:
            watcher = watch(note, seconds)
            asked = [clients.submit(ask_pool, pool, ledger, i, started + seconds) for i in range(CLIENTS)]
            for version in range(1, 21):
                time.sleep(max(0.0, started + version * seconds / 21 - time.monotonic()))
                pool.update_weights(WeightManifest(version=version, tensors=manifest), buckets)
            for one in asked:
                one.result()
            watcher.join()
        took, restarts = time.monotonic() - started, pool.restarts
    return [
        *ledger.rows("pool", took), workers.row("load/pool_memory_growth"), driver.row("load/driver_memory_growth"),
        report("load/pool_restarts", restarts, detail="of workers, such as those that Ray ends where memory runs low"),
        report("load/pool_handoffs", 20),
    ]  # fmt: skip


def ask_pool(pool: RolloutPool, ledger: Ledger, mine: int, until: float) -> None:
    turn = 0
    while time.monotonic() < until:
        numbers = [2 * (turn * CLIENTS + mine) + i for i in range(2)]
        requests = [question(f"client {mine} turn {turn} part {i}", number) for i, number in enumerate(numbers)]
        for request in requests:
            ledger.send(request)
        started = time.monotonic()
        try:
            for one in pool.generate(requests):
                ledger.take(one.request_id, one.response_ids.tolist(), time.monotonic() - started)
        except (RuntimeError, ValueError) as error:
            ledger.faults.append(f"client {mine} turn {turn}: {type(error).__name__} {error}")
        turn += 1


def watch(note: Callable[[], None], seconds: float) -> threading.Thread:
    """Call `note` about once a second, or twenty times, for so long."""

    def run() -> None:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            note()
            time.sleep(min(1.0, seconds / 20))

    thread = threading.Thread(target=run, name="watch")
    thread.start()
    return thread


def resident_mb(pid: int) -> float:
    """Resident size of a process now, MiB (Linux)."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
