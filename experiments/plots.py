"""Small multiples of a run as inline SVG: arms overlaid, readable on light and dark paper and without colour."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

from experiments.artifacts import arm_and_seed
from experiments.tracking import METRICS_FILE, read_metrics

Series = Mapping[str, Mapping[int, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot. metrics: names in order of preference, the first that any arm logged is drawn."""

    title: str
    metrics: tuple[str, ...]
    note: str


PANELS = (
    Panel("Reward", ("rollout/raw_reward",), "mean over the step's rollouts"),
    Panel("Held-out reward", ("eval/reward",), "before and after training"),
    Panel("Accept length", ("spec/accept_length",), "committed tokens a verify step"),
    Panel("Throughput", ("rollout/tokens_per_s",), "response tokens a second"),
    Panel("Logprob gap", ("train/train_rollout_logprob_abs_diff",), "mean |log p - log q|"),
    Panel("Support size", ("sc/support_size",), "tokens recorded a row"),
    Panel("Head mass", ("sc/head_mass",), "engine's mass on the recorded tokens"),
    Panel("Correction norm", ("sc/correction_norm",), "L2 in logit space, a token"),
    Panel("Gradient norm", ("train/grad_norm",), "before clipping"),
    Panel("Entropy", ("train/entropy",), "of the trainer's law, nats"),
    Panel("Handoff", ("perf/update_weights_time", "handoff/seconds"), "seconds"),
    Panel("Staleness", ("rollout/staleness_mean",), "handoffs between sampling and training, a token"),
    Panel("Step time", ("perf/step_time",), "seconds"),
)

# Each arm has a colour, a dash and a marker. The colours are placeholders: the page maps them to its own variables.
STYLES = (("-", "o"), ("--", "s"), ("-.", "^"), (":", "D"), ((0, (5, 1, 1, 1)), "v"), ((0, (1, 1)), "P"))
_INK, _ARM = "#010203", "#0102f{}"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "report", "font.family": "sans-serif", "font.size": 9,
    "axes.edgecolor": _INK, "axes.labelcolor": _INK, "text.color": _INK, "xtick.color": _INK, "ytick.color": _INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6, "axes.grid": True,
    "grid.color": _INK, "grid.alpha": 0.12, "grid.linewidth": 0.5, "xtick.major.width": 0.6, "ytick.major.width": 0.6,
}  # fmt: skip


def read_series(arm_dirs: Sequence[Path]) -> dict[str, list[Series]]:
    """{arm: metrics of each of its seeds} in order of first appearance."""
    found: dict[str, list[Series]] = {}
    for arm_dir in arm_dirs:
        series = read_metrics(arm_dir) if (arm_dir / METRICS_FILE).exists() else {}
        found.setdefault(arm_and_seed(arm_dir)[0], []).append(series)
    return found


def draw(panel: Panel, arms: Mapping[str, Sequence[Series]]) -> str | None:
    """The panel as an <svg> element, None where no arm has a number for it. One line a seed."""
    name = next(
        (name for name in panel.metrics if any(name in series for runs in arms.values() for series in runs)), None
    )
    if name is None:
        return None
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(3.5, 2.1), layout="constrained")
        for number, runs in enumerate(arms.values()):
            dash, marker = STYLES[number % len(STYLES)]
            for series in runs:
                points = series.get(name, {})
                steps = [step for step in sorted(points) if math.isfinite(points[step])]
                axes.plot(
                    steps, [points[step] for step in steps], color=_ARM.format(number % len(STYLES)), linestyle=dash,
                    marker=marker, markersize=3, markevery=max(1, len(steps) // 6), linewidth=1.5,
                )  # fmt: skip
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.set_xlabel("step")
        axes.margins(x=0.02, y=0.12)
        axes.ticklabel_format(axis="y", useOffset=False)
        low, high = axes.get_ylim()
        if high - low < 1e-3 * max(abs(low), abs(high)):  # rounding is no curve
            axes.set_ylim(low - 0.05 * abs(low), high + 0.05 * abs(high))
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    return _embed(buffer.getvalue(), panel.title)


def key(number: int) -> str:
    """The legend mark of arm `number`, drawn like its lines."""
    dash, marker = STYLES[number % len(STYLES)]
    with plt.rc_context(_STYLE):
        figure = plt.figure(figsize=(0.5, 0.18))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.axis("off")
        axes.plot(
            [0, 1, 2], [0, 0, 0], color=_ARM.format(number % len(STYLES)), linestyle=dash, marker=marker,
            markersize=4, markevery=[1], linewidth=1.8,
        )  # fmt: skip
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    return _embed(buffer.getvalue(), "")


def _embed(svg: str, label: str) -> str:
    """Strip what only a file needs, name the colours of the page, and keep the ids of one plot apart from another's."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace(_INK, "currentColor")
    svg = re.sub(r"#0102f(\d)", r"var(--arm-\1)", svg)
    prefix = re.sub(r"\W+", "-", label.lower()) or "key"
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf"\1{prefix}-", svg)
    described = f'role="img" aria-label="{label}"' if label else 'aria-hidden="true"'
    return re.sub(
        r'<svg [^>]*?(width="[^"]*" height="[^"]*") (viewBox="[^"]*")[^>]*>', rf"<svg {described} \2>", svg, count=1
    )
