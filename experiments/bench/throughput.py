"""Tokens a second of sglang servers that run already: what speculation gains on a real model, and what capture costs.

    python -m experiments.bench.throughput --target FOLDER --json FILE --seconds 120 \\
        --server regular=http://127.0.0.1:30100 --server dflash=... --server dflash2=...

1, 8, 32 or 64 responses of 256 tokens are asked for at once; stop tokens are ignored, so that every response has them.
Prompts are questions of a JSON lines file in the target's chat template, the same for every server and capture of a
repeat, and share what comes before the question, which servers keep cached. The clock runs from the first request to
the last answer read; rows are unpacked and checked afterwards. Servers take turns within a repeat. What is measured is
written after every block; where the seconds run out, 1 and 64 lose repeats first.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import cast

import numpy as np

from experiments.evidence import Row, print_rows, report, write_json
from experiments.tasks.text import Chat, read_preamble, read_problems
from miles_ext.capability import ArmKind
from miles_ext.records import Completion
from miles_ext.sampling import SamplingSpec
from rollout.config import RolloutConfig
from rollout.engine import Request
from rollout.sglang_engine.answers import Served, body, completion
from rollout.sglang_engine.client import Client
from rollout.sglang_engine.engine import SglangEngine

TASK = Path(__file__).parents[1] / "tasks" / "running_sum"
CONCURRENCIES, MAIN, REPEATS, LENGTH, CONTEXT = (1, 8, 32, 64), (8, 32), 3, 256, 1024
PLAIN = SamplingSpec(capture="off")
FILTERED = SamplingSpec(top_k=50, top_p=0.95, capture="off")
# Name of a capture -> (the spec that records, the name of the same law unrecorded).
CAPTURES = {
    "k32": (replace(PLAIN, capture="head", head_size=32), "unfiltered"),
    "k128": (replace(PLAIN, capture="head", head_size=128), "unfiltered"),
    "filtered": (replace(FILTERED, capture="complete"), "filtered law"),
}
SPECS = {name: on for name, (on, _) in CAPTURES.items()} | {"unfiltered": PLAIN, "filtered law": FILTERED}


@dataclass(frozen=True)
class Run:
    """One timed batch. accept_length: committed tokens a live step, the prefill token left out. step_ms: seconds over
    the live steps of the response that took most of them; prefill and HTTP are in it."""

    arm: str
    law: str
    concurrency: int
    repeat: int
    seconds: float
    tokens_per_s: float
    accept_length: float
    step_ms: float


class Server:
    """A running server, asked without unpacking what it answers. CapabilityError where it lacks the plugin."""

    def __init__(self, arm: ArmKind, url: str, target: Path) -> None:
        config = RolloutConfig(
            engine="sglang", dtype="bfloat16", context_length=CONTEXT, max_concurrency=max(CONCURRENCIES)
        )
        engine = SglangEngine(config, arm, target, None, arm, url)
        (first, *_) = engine.capability()
        engine.close()
        if first.arm != arm:
            raise ValueError(f"the server at {url} decodes as {first.arm!r}; named here: {arm!r}")
        self.client = Client(url, config.request_timeout_s, config.max_concurrency)
        self.served = Served(arm, first.draft_digest, first.vocab_size, CONTEXT, frozenset(), seeded=False)

    def run(self, requests: Sequence[Request]) -> tuple[float, list[Completion]]:
        """Seconds, and the checked completions."""
        bodies = [body(request, self.served) for request in requests]
        started = time.perf_counter()
        answers = self.client.generate(bodies)
        seconds = time.perf_counter() - started
        return seconds, [completion(*pair, self.served) for pair in zip(requests, answers, strict=True)]


class Prompts:
    """target: whose chat template is applied. questions: JSON lines file."""

    def __init__(self, target: Path, questions: Path, preamble: Path | None) -> None:
        chat = Chat(target, read_preamble(preamble))
        asked = [chat.encode(problem.question) for problem in read_problems(questions).problems]
        self.ids = [np.array(ids, np.int32) for ids in asked]

    def requests(self, law: str, concurrency: int, repeat: int) -> list[Request]:
        return [
            Request(
                request_id=f"{law} {concurrency} {repeat} {i}".replace(" ", "-"),
                prompt_ids=self.ids[(repeat * concurrency + i) % len(self.ids)],
                spec=replace(SPECS[law], seed=1000 * repeat + i), max_new_tokens=LENGTH,
            )
            for i in range(concurrency)
        ]  # fmt: skip


def blocks() -> Iterator[tuple[int, int]]:
    """(concurrency, repeat): each once untimed as repeat -1, then what matters most first."""
    yield from ((concurrency, -1) for concurrency in CONCURRENCIES)
    yield from ((concurrency, 0) for concurrency in CONCURRENCIES)
    for chosen in (MAIN, tuple(sorted(set(CONCURRENCIES) - set(MAIN)))):
        yield from ((concurrency, repeat) for repeat in range(1, REPEATS) for concurrency in chosen)


def measure(servers: dict[str, Server], prompts: Prompts, concurrency: int, repeat: int) -> list[Run]:
    """Every law on every server once; laws and servers in the other order from one repeat to the next."""
    turn = 1 if repeat % 2 else -1
    found = []
    for law in list(SPECS)[::turn]:
        for arm, server in list(servers.items())[::turn]:
            seconds, done = server.run(prompts.requests(law, concurrency, max(repeat, 0)))
            tokens, steps = sum(map(len, done)), [one.spec.live_steps for one in done]
            if tokens != concurrency * LENGTH:
                raise ValueError(f"{arm}: {tokens} tokens of {concurrency * LENGTH}")
            accepted = (tokens - len(done)) / sum(steps)
            found.append(
                Run(arm, law, concurrency, repeat, seconds, tokens / seconds, accepted, 1000 * seconds / max(steps))
            )
    return found


def rows(runs: Sequence[Run]) -> list[Row]:
    """Speeds, step times and accept lengths, and ratios paired by repeat; every repeat is in the detail."""
    found = []
    arms, sizes = dict.fromkeys(run.arm for run in runs), sorted({run.concurrency for run in runs})

    def of(arm: str, law: str, size: int) -> dict[int, Run]:
        return {run.repeat: run for run in runs if (run.arm, run.law, run.concurrency) == (arm, law, size)}

    for size in sizes:
        for law in SPECS:
            for arm in arms:
                mine = list(of(arm, law, size).values())
                if not mine:
                    continue
                where = f"{arm} {law} x{size}"
                found.append(reported(f"throughput/{where}", [run.tokens_per_s for run in mine], "tokens/s"))
                found.append(reported(f"throughput/step {where}", [run.step_ms for run in mine], "ms"))
                if arm != "regular":
                    found.append(reported(f"throughput/accept {where}", [run.accept_length for run in mine], "tokens"))
                    name = f"throughput/{arm}_over_regular {law} x{size}"
                    found += ratio(name, of(arm, law, size), of("regular", law, size))
                if law in CAPTURES:
                    name = f"throughput/capture_on_over_off {where}"
                    found += ratio(name, of(arm, law, size), of(arm, CAPTURES[law][1], size))
    return found


def ratio(name: str, over: dict[int, Run], under: dict[int, Run]) -> list[Row]:
    both = sorted(over.keys() & under.keys())
    return [reported(name, [over[i].tokens_per_s / under[i].tokens_per_s for i in both], "x")] if both else []


def reported(name: str, values: Sequence[float], unit: str) -> Row:
    """The median; every value in the detail, in the order measured."""
    return report(name, median(values), unit, ", ".join(f"{value:.4g}" for value in values))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.bench.throughput", description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="folder of the model that is served")
    parser.add_argument("--server", action="append", required=True, metavar="ARM=URL", help="regular, dflash, dflash2")
    parser.add_argument("--questions", type=Path, default=TASK / "long.jsonl")
    parser.add_argument("--preamble", type=Path, default=TASK / "preamble.json")
    parser.add_argument("--seconds", type=float, default=120.0, help="no block begins after so long")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="rows; FILE.runs.json has every batch")
    args = parser.parse_args(arguments)
    first = time.monotonic()
    named = (one.partition("=") for one in args.server)
    servers = {arm: Server(cast(ArmKind, arm), url, args.target) for arm, _, url in named}
    prompts, runs = Prompts(args.target, args.questions, args.preamble), list[Run]()
    command = f"python -m experiments.bench.throughput --seconds {args.seconds:g}"
    for concurrency, repeat in blocks():
        if time.monotonic() - first > args.seconds:
            print(f"{args.seconds:g} s are over before x{concurrency}, repeat {repeat}", flush=True)
            break
        runs += [run for run in measure(servers, prompts, concurrency, repeat) if run.repeat >= 0]
        print(f"x{concurrency} repeat {repeat} after {time.monotonic() - first:.0f} s", flush=True)
        if runs:
            write_json(args.json, command, rows(runs))
            args.json.with_suffix(".runs.json").write_text(json.dumps([asdict(run) for run in runs]) + "\n")
    print_rows(rows(runs), "bench throughput")


if __name__ == "__main__":
    main()
