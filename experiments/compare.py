"""`python -m experiments compare RUN_DIR...`: one self-contained page on which a person sees which arm drifts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from experiments.evidence import figure, versions
from experiments.joined import FIGURES, Family, Joined, Run, join
from experiments.statistics import LEVEL, Estimate

COMPARE_FILE, PAGE_FILE = "compare.json", "report.html"
TEMPLATE = Path(__file__).with_name("compare.html.j2")
PLOTS = (("reward", "rollout/raw_reward"), ("entropy", "train/entropy"))
WIDTH, HEIGHT = 132, 64
VISIBLE = 0.01  # of a reward or a nat: less is no verdict, whatever the intervals say


def compare(run_dirs: Sequence[Path], folder: Path) -> Joined:
    """Join the runs, write `folder`/compare.json and `folder`/report.html, and return what was found."""
    joined = join(run_dirs)
    document = joined.document() | {"folders": [str(path) for path in run_dirs], "versions": versions()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / COMPARE_FILE).write_text(json.dumps(finite(document), indent=1, allow_nan=False) + "\n")
    (folder / PAGE_FILE).write_text(page(joined, run_dirs))
    return joined


def page(joined: Joined, run_dirs: Sequence[Path]) -> str:
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    lone = [run for run in joined.runs if not any(run.arm in (f.treated, f.control) for f in joined.families)]
    return environment.from_string(TEMPLATE.read_text()).render(
        title=" + ".join(path.name for path in run_dirs), joined=joined, level=f"{LEVEL:.0%}",
        cells=[cell(family, joined.runs) for family in joined.families],
        tables=[table(family) for family in joined.families],
        runs=[(run, run.figures()) for run in joined.runs], lone=[f"{run.arm}-s{run.seed}" for run in lone],
        headings=[(name, FIGURES[name][0]) for name in FIGURES], figure=figure, versions=versions(),
    )  # fmt: skip


def verdict(family: Family) -> tuple[str, str]:
    """(kind, words) of a family: `drifts`, `worse` or `same`, judged by reward first and by entropy second."""
    for name in ("reward", "entropy"):
        if name in family.figures:
            treated, control, difference = family.figures[name]
            if difference.shown != "not shown" and abs(difference.mean) >= VISIBLE:
                mark = "" if difference.shown == "shown" else "?"
                what = "drifts" if difference.mean > 0 else "worse"
                return what, f"{name} {control.mean:.2f} without, {treated.mean:.2f} with{mark}"
    return "same", "no difference shown"


def cell(family: Family, runs: Sequence[Run]) -> dict[str, Any]:
    kind, words = verdict(family)
    arms = (family.control, family.treated)
    sides = [[run for run in runs if run.arm == arm and run.seed in family.seeds] for arm in arms]
    plots = []
    for name, metric in PLOTS:
        svg = small_multiple([[run.series.get(metric, {}) for run in side] for side in sides], name == "reward")
        plots += [(name, svg)] if svg else []
    return {"family": family, "kind": kind, "words": words, "plots": plots}


def small_multiple(sides: Sequence[Sequence[dict[int, float]]], unit: bool) -> str:
    """Control dashed below, treated on top: thin lines are seeds, thick ones their means. unit: the axis is 0 to 1."""
    points = [p for side in sides for series in side for p in series.items() if math.isfinite(p[1])]
    if not points:
        return ""
    steps, values = zip(*points, strict=True)
    last, low, high = max(max(steps), 1), 0.0 if unit else min(values), 1.0 if unit else max(values)
    low, high = min(low, *values), max(high, *values)
    span = high - low or 1.0

    def line(series: dict[int, float], style: str) -> str:
        drawn = sorted((step, value) for step, value in series.items() if math.isfinite(value))
        spots = " ".join(f"{4 + 124 * s / last:.1f},{4 + 56 * (high - v) / span:.1f}" for s, v in drawn)
        return f'<polyline class="{style}" points="{spots}"/>'

    lines = []
    for word, side in zip(("control", "treated"), sides, strict=True):
        common = set.intersection(*(set(series) for series in side)) if side else set()
        mean = {step: float(np.mean([series[step] for series in side])) for step in common}
        lines += [line(series, f"{word} seed") for series in side] + [line(mean, f"{word} mean")]
    label = f"{figure(low, 2)} to {figure(high, 2)}"
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f'<path class="frame" d="M4 4V60H128"/>{"".join(lines)}'
        f'<text x="7" y="11">{figure(high, 2)}</text><text x="7" y="57">{figure(low, 2)}</text></svg>'
    )


def table(family: Family) -> dict[str, Any]:
    rows = [
        (FIGURES[name][0], figure(control.mean, 3), figure(treated.mean, 3), spelt(difference), difference.shown)
        for name, (treated, control, difference) in family.figures.items()
    ]
    return {"name": family.name, "control": family.control, "seeds": len(family.seeds), "rows": rows}


def spelt(found: Estimate) -> str:
    """`+0.31 [0.2, 0.4] t [0.1, 0.5]`."""
    if found.count == 1:
        return f"{found.mean:+.3g} (one seed)"
    return (
        f"{found.mean:+.3g} [{found.low:.3g}, {found.high:.3g}] t [{found.t_low:.3g}, {found.t_high:.3g}]"
    )  # fmt: skip


def finite(value: Any) -> Any:
    """JSON has no NaN: it becomes null."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
