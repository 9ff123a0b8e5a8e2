"""Part `cost`: what capture costs eight concurrent responses, and what the plugin costs beside stock sglang.

    python -m tests.sglang_cuda.show_cost OUT.json NAME=URL ... [--seconds 100] [--vocabulary 49152]

measures servers that run already (NAME: regular, dflash, dflash2; `stock` is compared with regular) for so long in all,
taking turns, and writes OUT.json after each turn.

Capture on and off alternate on one warm server (off, on, on, off: a drift of the machine cancels), and stock sglang
runs before and after them. Each pair of neighbours gives one loss; a row is their median, with a bootstrap interval.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import requests

from experiments.evidence import Row, at_most, print_rows, report, write_json
from miles_ext.sampling import SamplingSpec
from tests.sglang_cpu.answers import params
from tests.sglang_cpu.server import Server

CONCURRENT, WARM, LEAST_ROUNDS = 8, 1, 3
HEAD_32, HEAD_128 = {"capture": "head", "head_size": 32}, {"capture": "head", "head_size": 128}
NUCLEUS, LARGE = {"top_k": 50, "top_p": 0.95}, {"top_k": 1024}
# name: sampled as, captured as, the most that capture may cost
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "K32": ({}, HEAD_32, 0.05),
    "K128": ({}, HEAD_128, 0.05),
    "k50 p0.95": (NUCLEUS, {}, 0.05),
    "k1024": (LARGE, {}, 0.10),
}


@dataclass
class Rates:
    """Tokens a second of one case, in the order measured, and bytes of a captured response."""

    off: list[float] = field(default_factory=list)
    on: list[float] = field(default_factory=list)
    stock: list[float] = field(default_factory=list)
    size: float = 0.0


def rows(server: Server, name: str, length: int, vocabulary: int, seconds: float, stock: Server | None) -> list[Row]:
    """seconds: the rounds end after this long, and not before LEAST_ROUNDS. stock: without the plugin, same model."""
    cases = {case: fields for case, fields in CASES.items() if fields[0].get("top_k", 0) < vocabulary}
    rates = {case: Rates() for case in cases}
    with Load(vocabulary, length) as load:
        for filters, capture, _ in cases.values():  # compiles kernels, fills caches
            for _ in range(WARM):
                for sampling in (plain(filters, length), captured(filters, capture, length)):
                    load.run(server, sampling)
                if stock:
                    load.run(stock, plain(filters, length))
        first, rounds = time.monotonic(), 0
        while rounds < LEAST_ROUNDS or time.monotonic() - first < seconds:
            for case, (filters, capture, _) in cases.items():
                measure_round(load, server, stock, filters, capture, rates[case])
            rounds += 1
    return [row for case in cases for row in judge(name, case, rates[case])]


def measure_round(load: Load, server: Server, stock: Server | None, filters: Any, capture: Any, rates: Rates) -> None:
    off, on = plain(filters, load.length), captured(filters, capture, load.length)
    for kind in ("stock", "off", "on", "on", "off", "stock"):
        if kind == "stock":
            if stock:
                rates.stock.append(load.run(stock, off)[0])
        elif kind == "off":
            rates.off.append(load.run(server, off)[0])
        else:
            rate, rates.size = load.run(server, on)
            rates.on.append(rate)


def plain(filters: dict[str, Any], length: int) -> dict[str, Any]:
    return {"temperature": 1.0, **filters, "max_new_tokens": length, "ignore_eos": True}


def captured(filters: dict[str, Any], capture: dict[str, Any], length: int) -> dict[str, Any]:
    return params(SamplingSpec(**filters, **capture), max_new_tokens=length, ignore_eos=True)


class Load:
    """Eight clients with open connections and prompts of random tokens."""

    def __init__(self, vocabulary: int, length: int, timeout: float = 120) -> None:
        self.length, self.timeout = length, timeout
        self.prompts = np.random.default_rng(1).integers(3, vocabulary, (CONCURRENT, 16)).tolist()
        self.sessions = [requests.Session() for _ in range(CONCURRENT)]
        self.pool = ThreadPoolExecutor(CONCURRENT)

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown()

    def run(self, server: Server, sampling: dict[str, Any]) -> tuple[float, float]:
        """Tokens a second from the first request sent to the last byte received, and mean bytes of a response."""

        def one(client: int) -> bytes:
            body = orjson.dumps({"input_ids": self.prompts[client], "sampling_params": sampling})
            headers = {"Content-Type": "application/json"}
            answer = self.sessions[client].post(
                server.url + "/generate", data=body, headers=headers, timeout=self.timeout
            )
            answer.raise_for_status()
            return answer.content

        first = time.perf_counter()
        contents = list(self.pool.map(one, range(CONCURRENT)))
        seconds = time.perf_counter() - first
        metas = [orjson.loads(content)["meta_info"] for content in contents]
        tokens = sum(meta["completion_tokens"] for meta in metas)
        if tokens != CONCURRENT * self.length:
            raise ValueError(f"{tokens} tokens of {CONCURRENT * self.length}: {contents[0][:300]!r}")
        if all("sc" in meta for meta in metas) != ("custom_params" in sampling):
            raise ValueError(f"rows where none were asked, or none where they were: {contents[0][:300]!r}")
        return tokens / seconds, statistics.mean(map(len, contents))


def judge(name: str, case: str, rates: Rates) -> list[Row]:
    limit = CASES[case][2]
    found = [
        report(f"cost/{name} {case} off", statistics.median(rates.off), "tok/s", spread(rates.off)),
        report(
            f"cost/{name} {case} on", statistics.median(rates.on), "tok/s",
            f"{spread(rates.on)}; {rates.size / 1e3:.1f} kB a response",
        ),
        loss(f"loss/{name} {case}", rates.on, rates.off, 100 * limit),
    ]  # fmt: skip
    if rates.stock:
        found.append(loss(f"overhead/{name} {case} off, beside stock", rates.off, rates.stock, 3.0))
        found.append(report(f"cost/{name} {case} stock", statistics.median(rates.stock), "tok/s", spread(rates.stock)))
    return found


def loss(title: str, slower: list[float], faster: list[float], limit: float) -> Row:
    """Median loss of neighbours in per cent; the 95 % interval is of the median over resampled pairs."""
    pairs = 100 * (1 - np.array(slower) / np.array(faster))
    resampled = np.random.default_rng(0).choice(pairs, (10_000, len(pairs)))
    low, high = np.quantile(np.median(resampled, axis=1), [0.025, 0.975])
    listed = ", ".join(f"{pair:.1f}" for pair in pairs)
    detail = f"median of {len(pairs)} pairs, 95 % interval {low:.1f} to {high:.1f}; {listed}"
    return at_most(title, float(np.median(pairs)), limit, "%", detail)


def spread(rates: list[float]) -> str:
    return ", ".join(f"{rate:.0f}" for rate in rates)


def compare_running(out: Path, servers: dict[str, Server], vocabulary: int, seconds: float) -> list[Row]:
    """Turns of every arm and case until the time is up, one of each at least. A case that breaks is a failed row, and
    the others go on."""
    deadline, length = time.monotonic() + seconds, 256
    stock = servers.get("stock")
    turns = [(arm, case) for arm in servers if arm != "stock" for case in CASES]
    rates, broken = {turn: Rates() for turn in turns}, dict[tuple[str, str], Row]()
    command, found, longest = "python -m tests.sglang_cuda.show_cost " + " ".join(sys.argv[1:]), [], 0.0
    with ThreadPoolExecutor(len(servers)) as pool:
        list(pool.map(lambda server: warm_up(server, server is not stock, vocabulary), servers.values()))
    print(f"{deadline - time.monotonic():.0f} of {seconds:g} s left after the warm-up", flush=True)
    with Load(vocabulary, length, timeout=30) as load:
        rounds = 0
        while set(turns) - set(broken) and (rounds == 0 or time.monotonic() + longest < deadline):
            for arm, case in turns:
                if (arm, case) in broken or (rounds and time.monotonic() + longest > deadline):
                    continue
                first, (filters, capture, _) = time.monotonic(), CASES[case]
                beside = stock if arm == "regular" else None
                try:
                    measure_round(load, servers[arm], beside, filters, capture, rates[arm, case])
                except (requests.RequestException, ValueError) as error:
                    traceback.print_exc()
                    broken[arm, case] = Row(
                        f"cost/{arm} {case} runs", float("nan"), "", "runs", False, str(error)[:600]
                    )
                longest = max(longest, time.monotonic() - first)
                found = [row for turn in turns for row in rows_of(turn, rates[turn], broken)]
                write_json(out, command, found)
            rounds += 1
    return found


def rows_of(turn: tuple[str, str], rates: Rates, broken: dict[tuple[str, str], Row]) -> list[Row]:
    measured = judge(*turn, rates) if len(rates.on) == len(rates.off) > 0 else []
    return measured + [broken[turn]] if turn in broken else measured


def warm_up(server: Server, captures: bool, vocabulary: int) -> None:
    """Compiles the kernels of every case."""
    with Load(vocabulary, 16) as load:
        for filters, capture, _ in CASES.values():
            for sampling in [plain(filters, 16), captured(filters, capture, 16)][: 1 + captures]:
                try:
                    load.run(server, sampling)
                except (requests.RequestException, ValueError):
                    traceback.print_exc()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--seconds", type=float, default=100, help="of the whole, warm-up included")
    parser.add_argument("--vocabulary", type=int, default=49_152)
    options = parser.parse_args()
    if wrong := [text for text in options.servers if "=" not in text]:
        parser.error(f"{wrong[0]!r}; accepted: NAME=URL")
    named = dict(text.split("=", 1) for text in options.servers)
    servers = {name: Server(url.rstrip("/"), cast(Any, None), Path()) for name, url in named.items()}
    found = compare_running(options.out, servers, options.vocabulary, options.seconds)
    print_rows(found)
    return int(not found or not all(row.passed for row in found))


if __name__ == "__main__":
    sys.exit(main())
