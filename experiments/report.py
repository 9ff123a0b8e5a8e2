"""report.html: one self-contained page of a run. No network, no script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from experiments.artifacts import arm_dirs
from experiments.comparison import HEADLINES, alarm_lines, compare, ending, pairing_sentence
from experiments.evidence import figure, versions
from experiments.plots import PANELS, draw, key, read_series

REPORT_FILE = "report.html"
TEMPLATE = Path(__file__).with_name("report.html.j2")


def write_report(run_dir: Path) -> Path:
    """Compare the arms of a run again, draw them, and write <run_dir>/report.html."""
    comparison = compare(run_dir)
    series = read_series(arm_dirs(run_dir))
    drawn = [(panel, draw(panel, series)) for panel in PANELS]
    config = run_dir / "config.yaml"
    page = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE.read_text())
    html = page.render(
        experiment=comparison["experiment"],
        headings=[heading for heading, _, _ in HEADLINES],
        rows=[_row(arm, list(series).index(arm["arm"])) for arm in comparison["arms"]],
        keys=[(name, key(number)) for number, name in enumerate(series)],
        alarms=[line for arm in comparison["arms"] for line in alarm_lines(arm)],
        endings=[ending(arm) for arm in comparison["arms"] if arm["state"] != "finished"],
        paired=comparison["pairing"]["paired"],
        pairing=pairing_sentence(comparison["pairing"]),
        panels=[(panel, svg) for panel, svg in drawn if svg],
        absent=[panel.title for panel, svg in drawn if not svg],
        config=config.read_text() if config.exists() else "",
        versions=versions(),
    )
    (run_dir / REPORT_FILE).write_text(html)
    return run_dir / REPORT_FILE


def _row(arm: dict[str, Any], number: int) -> dict[str, Any]:
    """The arm with what the headline table shows of it: (heading, figure, range) a column."""
    cells = []
    for heading, summary, name in HEADLINES:
        found = arm[summary]
        spread = name == "median" and found["min"] is not None
        title = f"range {figure(found['min'])} to {figure(found['max'])}" if spread else ""
        cells.append((heading, "-" if found[name] is None else figure(found[name], 3), title))
    return {**arm, "key": key(number), "cells": cells}
