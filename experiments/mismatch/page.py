"""docs/results/mismatch.md from what the study found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.evidence import figure
from experiments.joined import Joined
from experiments.mismatch.findings import ADDITION, EXPECTED, expectation_rows, headline

ABOUT = """A policy gradient on rollouts from a policy q that is not the trainer's p contains a drift, `E_q[A] mu` with
`mu = E_q[w s]`, that carries no reward information; centering subtracts it. Here the two differ in declared ways
(`rollout.mismatch`), once on a chain of six tokens whose drift is enumerable, once on the tiny addition model with the
product's engine, trainer and arms. Control arms measure the correction and apply nothing (`diagnose`).

Names read *mismatch*-*advantage*-*mode*: `noise1` adds Gaussian noise of that standard deviation to the chain's
logits, `noise0.05` to the model's matrices in units of their root mean square; `lag8` samples from the weights of 8
updates ago; `int8`, `int4` and `bf16` round the rollout copy; `exact` changes nothing. `raw` is the reward itself,
`group` subtracts the mean of its group, `placebo` gives every response the same, so that all movement is drift.

Every figure reads *control to centered*, means over the paired seeds (same initial weights, same prompts, by digest).
**Bold**: zero lies outside the 95 % percentile bootstrap and Student's interval of the paired difference; `?`: outside
the bootstrap alone, which is too narrow with so few seeds. One comparison in twenty leaves zero out by chance."""
COLUMNS = {
    "chain": ("reward", "trained", "entropy", "gap", "drift", "signal", "correction", "head_mass"),
    "addition": ("reward", "trained", "entropy", "gap", "correction", "head_mass", "accept"),
}


def write_page(file: Path, evidence: dict[str, Any], chain: Joined, addition: Joined, wanted: Sequence[str]) -> None:
    """wanted: the arms of the config, so that one which was never begun is named."""
    machine = "; ".join(f"{name} {value}" for name, value in {**evidence["versions"], **evidence["hardware"]}.items())
    lines = ["# Drift under mismatch, with and without centering", "", ABOUT, ""]
    lines += [f"Written by `{evidence['command']}`.", "", f"Measured with: {machine}.", ""]
    lines += ["## Expected and found", "", *grid(("claim", "expected", "found, centered - control", "verdict"), [
        *expectation_rows("addition", addition, ADDITION), *expectation_rows("chain", chain, EXPECTED)])]  # fmt: skip
    gated = [row for row in evidence["rows"] if row["gate"]]
    lines += ["", "## What is exact, and what was run", "", *grid(("row", "value", "gate", "result", "detail"), [
        (row["name"], "-" if row["value"] is None else f"{figure(row['value'])} {row['unit']}".strip(), row["gate"],
         "pass" if row["pass"] else "**FAIL**", row["detail"]) for row in gated])]  # fmt: skip
    for name, joined in (("addition", addition), ("chain", chain)):
        columns = [one for one in COLUMNS[name] if any(one in family.figures for family in joined.families)]
        lines += ["", f"## {name.capitalize()}: every comparison", "", *grid(("family", "seeds", *columns), [
            (family.name + (" (off)" if family.control.endswith("-off") else ""), str(len(family.seeds)),
             *(headline(family, one) for one in columns)) for family in joined.families])]  # fmt: skip
        if joined.left_out:
            lines += ["", "Left out: " + "; ".join(joined.left_out) + "."]
    begun = {run.arm for run in addition.runs}
    absent = [name for name in wanted if name not in begun]
    if absent:
        lines += [
            "",
            f"Arms of `experiments/configs/mismatch.yaml` that the time limit left unbegun: {', '.join(absent)}.",
        ]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n")


def grid(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
