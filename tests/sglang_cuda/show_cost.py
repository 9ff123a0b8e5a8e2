"""Part `cost`: throughput of eight concurrent responses, capture on against capture off."""

from __future__ import annotations

import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import requests

from experiments.evidence import Row, at_most, report
from miles_ext.sampling import SamplingSpec
from tests.sglang_cpu.answers import params
from tests.sglang_cpu.server import Server

CONCURRENT, ROUNDS = 8, 8
UNFILTERED, NUCLEUS, LARGE = {}, {"top_k": 50, "top_p": 0.95}, {"top_k": 1024}
# name: sampled as, captured as (None: not at all), whose loss against the first of the same filters, the gate
CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, float]] = {
    "unfiltered": (UNFILTERED, None, 0),
    "unfiltered K32": (UNFILTERED, {"capture": "head", "head_size": 32}, 0.05),
    "unfiltered K128": (UNFILTERED, {"capture": "head", "head_size": 128}, 0.05),
    "k50 p0.95": (NUCLEUS, None, 0),
    "k50 p0.95 captured": (NUCLEUS, {}, 0.05),
    "k1024": (LARGE, None, 0),
    "k1024 captured": (LARGE, {}, 0.10),
}


def rows(server: Server, name: str, length: int, vocabulary: int, captures: bool = True) -> list[Row]:
    """captures: whether the server has the plugin."""
    cases = {case: fields for case, fields in CASES.items() if fields[0].get("top_k", 0) < vocabulary}
    if not captures:
        cases = {case: fields for case, fields in cases.items() if fields[1] is None}
    rates: dict[str, list[float]] = {case: [] for case in cases}
    sizes: dict[str, float] = {}
    for _ in range(ROUNDS):
        for case, (filters, capture, _) in cases.items():
            rate, sizes[case] = measure(server, fields(filters, capture, length), vocabulary, length)
            rates[case].append(rate)
    return [row for case in cases for row in judge(name, case, rates, sizes[case])]


def fields(filters: dict[str, Any], capture: dict[str, Any] | None, length: int) -> dict[str, Any]:
    wanted = {"max_new_tokens": length, "ignore_eos": True}
    if capture is None:
        return {"temperature": 1.0, **filters, **wanted}
    return params(SamplingSpec(**filters, **capture), **wanted)


def measure(server: Server, sampling: dict[str, Any], vocabulary: int, length: int) -> tuple[float, float]:
    """Tokens a second from the first request sent to the last byte received, and mean bytes of a response."""
    prompts = np.random.default_rng(1).integers(3, vocabulary, (CONCURRENT, 16)).tolist()

    def one(prompt: list[int]) -> bytes:
        body = {"input_ids": prompt, "sampling_params": sampling}
        answer = requests.post(server.url + "/generate", json=body, timeout=120)
        answer.raise_for_status()
        return answer.content

    with ThreadPoolExecutor(CONCURRENT) as pool:
        first = time.perf_counter()
        contents = list(pool.map(one, prompts))
        seconds = time.perf_counter() - first
    tokens = sum(json.loads(content)["meta_info"]["completion_tokens"] for content in contents)
    if tokens != CONCURRENT * length:
        raise ValueError(f"{tokens} tokens of {CONCURRENT * length}: {contents[0][:300]!r}")
    return tokens / seconds, statistics.mean(map(len, contents))


def judge(name: str, case: str, rates: dict[str, list[float]], size: float) -> list[Row]:
    """The first round warms up and is dropped."""
    measured = rates[case][1:]
    middle = statistics.median(measured)
    every = ", ".join(f"{rate:.0f}" for rate in measured)
    detail = f"{every}; dropped {rates[case][0]:.0f}; {size / 1e3:.1f} kB a response"
    found = [report(f"cost/{name} {case}", middle, "tok/s", detail)]
    filters, capture, limit = CASES[case]
    if capture is not None:
        plain = next(other for other, fields in CASES.items() if fields[0] is filters and fields[1] is None)
        pairs = [1 - on / off for on, off in zip(measured, rates[plain][1:], strict=True)]
        loss = 1 - middle / statistics.median(rates[plain][1:])
        spread = ", ".join(f"{100 * pair:.1f}" for pair in pairs)
        found.append(at_most(f"loss/{name} {case}", 100 * loss, 100 * limit, "%", f"of medians; by round {spread}"))
    return found
