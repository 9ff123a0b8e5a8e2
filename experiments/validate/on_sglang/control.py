"""Row `control` on sglang: the plugin in force against sglang's own functions, and capture against none.

Stock sglang filters in another order in each place: `joint` in the sampler, `top_k_first` in the verifiers. Each is
compared in its native order, on logits that running servers computed, where no tie at a cutoff and no rounding of the
cumulative mass decides.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from experiments.evidence import Row, all_of, at_most, must_fail, report
from experiments.oracle import token_law
from experiments.validate.engines import Watched
from experiments.validate.on_sglang.engines import SglangEngines
from experiments.validate.settings import SETTINGS, Context
from miles_ext.capability import ArmKind
from miles_ext.sampling import FilterOrder, SamplingSpec
from rollout.engine import Engine, Request

Law = NDArray[np.float32]
LIMIT, NEAR = 6.1e-8, 1e-6
NATIVE: dict[str, FilterOrder] = {"regular": "joint", "verifiers": "top_k_first"}
STEEP = np.log(np.array([0.3, 0.2, 0.15, 0.12, 0.1, 0.08, 0.05], np.float32))
BY_DESIGN = {
    "tie at the top-k cutoff": (np.array([3, 2, 1, 1, 1, 0], np.float32), SamplingSpec(top_k=3), "tied tokens stay"),
    "order": (STEEP, SamplingSpec(top_k=3, top_p=0.6, filter_order="top_k_first"), "the server's order, everywhere"),
    "joint order": (STEEP, SamplingSpec(top_k=3, top_p=0.6, filter_order="joint"), "the server's order, everywhere"),
}


def rows(context: Context, engines: SglangEngines) -> list[Row]:
    found = [capture_off(context, engines, arm) for arm in engines.arms]
    logits, specs = cases(context, engines)
    count = len(logits)
    # sglang's imports take longer than its arithmetic: everything in one process each.
    ordered = {path: [replace(spec, filter_order=order) for spec in specs] for path, order in NATIVE.items()}
    hotter = [replace(spec, temperature=spec.temperature * 1.0001) for spec in specs[:20]]
    examples = [(z, spec) for z, spec, _ in BY_DESIGN.values()]
    every = [z for _ in NATIVE for z in logits] + logits[:20] + [z for z, _ in examples]
    asked = [spec for path in NATIVE for spec in ordered[path]] + hotter + [spec for _, spec in examples]
    stock, ours = (engines.bare_laws(every, asked, mode) for mode in ("stock", "laws"))
    for number, (path, order) in enumerate(NATIVE.items()):
        span = slice(number * count, (number + 1) * count)
        some = list(zip(logits, ordered[path], stock[path][span], ours[path][span], strict=True))
        pairs = [(a, b) for z, spec, a, b in some if decided(z, spec, a)]
        apart = [distance(a, b) for a, b in pairs]
        other = sum(bool(((a > 0) != (b > 0)).any()) for a, b in pairs)
        detail = f"{len(pairs)} rows of {len(SETTINGS)} settings, order {order}, median {np.median(apart):.2g}; "
        detail += f"{count - len(pairs)} with a tie or rounding at a cutoff left out"
        found += [
            at_most(f"control/{path}_stock", max(apart), LIMIT, "L1", detail),
            Row(f"control/{path}_stock_support", other, "rows differ", "0", other == 0, detail),
        ]
    first = len(NATIVE) * count
    pairs = zip(stock["verifiers"][first : first + 20], ours["verifiers"][count : count + 20], strict=True)
    warmer = at_most("control/control_temperature", max(distance(a, b) for a, b in pairs), LIMIT)
    found.append(must_fail(warmer, "a temperature off by 0.01 %"))
    last = slice(first + 20, None)
    return [*found, *by_design({p: (ours[p][last], stock[p][last]) for p in NATIVE}), neighbours()]


def distance(a: Law, b: Law) -> float:
    """L1."""
    return float(np.abs(a.astype(np.float64) - b).sum())


def capture_off(context: Context, engines: SglangEngines, arm: ArmKind) -> Row:
    """The same requests with the same draws, with capture and without: tokens, kinds and laws bit for bit."""
    engine, same, total = engines.open(arm), 0, 0
    for setting in SETTINGS:
        requests = engines.requests(setting, context.pick(1, 4), "spread")
        plain = [replace(request, spec=replace(request.spec, capture="off")) for request in requests]
        captured, without = (watched(engines, engine, some) for some in (requests, plain))
        same += sum(equal(a, b) for a, b in zip(captured, without, strict=True))
        total += len(requests)
    return all_of(f"control/{arm}_capture_off", same, total, "tokens and laws bit for bit as with it", "responses")


def watched(engines: SglangEngines, engine: Engine, requests: list[Request]) -> list[Watched]:
    with engines.watch(engine) as watch:
        engines.replay(engine, requests)
    return [watch.of(request) for request in requests]


def equal(a: Watched, b: Watched) -> bool:
    return a.tokens == b.tokens and a.kinds == b.kinds and np.array_equal(np.stack(a.laws), np.stack(b.laws))


def cases(context: Context, engines: SglangEngines) -> tuple[list[NDArray[np.float32]], list[SamplingSpec]]:
    """Rows of logits that servers computed, each under every setting."""
    logits, specs = [], []
    for number, setting in enumerate(SETTINGS):
        sample = context.sample(engines.arms[number % len(engines.arms)], setting)
        rows = np.concatenate([watched.logits for watched in sample.watched])[:: context.pick(12, 3)]
        logits += list(rows)
        specs += [replace(setting.spec(0), capture="off")] * len(rows)
    return logits, specs


def decided(logits: NDArray[np.float32], spec: SamplingSpec, stock: NDArray[np.float32]) -> bool:
    """Whether neither a tie at a cutoff nor rounding decides which tokens stock keeps."""
    kept, ranked = stock > 0, np.sort(logits)[::-1]
    tied = 0 < spec.top_k < len(ranked) and ranked[spec.top_k - 1] == ranked[spec.top_k]
    tied |= bool((~kept).any()) and float(logits[kept].min()) <= float(logits[~kept].max())
    _, margin = token_law(logits, spec.temperature, spec.top_k, spec.top_p, spec.filter_order)
    return not tied and margin > NEAR


def by_design(laws: dict[str, tuple[list[Law], list[Law]]]) -> list[Row]:
    """Where the law differs from stock on purpose, with the support sizes of one example in each path."""
    found = []
    for path, pair in laws.items():
        for (name, (_, _, reason)), ours, stock in zip(BY_DESIGN.items(), *pair, strict=True):
            sizes = int((ours > 0).sum()), int((stock > 0).sum())
            if sizes[0] != sizes[1]:
                detail = f"stock keeps {sizes[1]}: {reason}"
                found.append(report(f"control/by_design {path} {name}", sizes[0], "tokens kept", detail))
    return found


def neighbours() -> Row:
    detail = "does not exist on sglang: its draws depend on who shares the batch, so answers alone and beside others "
    return report("control/neighbours", 0, "not shown", detail + "cannot be compared token by token")
