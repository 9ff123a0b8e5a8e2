"""Rows of evidence and their one form: a table for people, JSON for machines, a Markdown page for the docs."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

PACKAGES = ("torch", "transformers", "numpy", "ray", "wandb", "safetensors", "sglang", "megatron-core")


@dataclass(frozen=True, slots=True)
class Row:
    """One measured claim. `gate` says in words what passes, None for a row that only reports."""

    name: str
    value: float
    unit: str = ""
    gate: str | None = None
    passed: bool = True
    detail: str = ""

    def as_json(self) -> dict[str, Any]:
        """JSON has no NaN: a value that is not finite becomes null and is spelt in the detail."""
        finite = math.isfinite(self.value)
        detail = self.detail if finite else f"value is {self.value}; {self.detail}"
        value = None if not finite else int(self.value) if float(self.value).is_integer() else float(self.value)
        return {
            "name": self.name, "value": value, "unit": self.unit,
            "gate": self.gate, "pass": self.passed, "detail": detail,
        }  # fmt: skip


def at_most(name: str, value: float, limit: float, unit: str = "", detail: str = "") -> Row:
    """Passes when value <= limit; a NaN fails."""
    return Row(name, float(value), unit, f"<= {limit:g}", bool(value <= limit), detail)


def at_least(name: str, value: float, limit: float, unit: str = "", detail: str = "") -> Row:
    """Passes when value >= limit; a NaN fails."""
    return Row(name, float(value), unit, f">= {limit:g}", bool(value >= limit), detail)


def all_of(name: str, held: int, total: int, detail: str = "", unit: str = "") -> Row:
    """Passes when every one of `total` cases held and there was at least one."""
    return Row(name, held, unit or f"of {total}", f"all of {total}", held == total > 0, detail)


def report(name: str, value: float, unit: str = "", detail: str = "") -> Row:
    return Row(name, float(value), unit, None, True, detail)


def not_measured(name: str, why: str) -> Row:
    """Stands for a figure that could not be taken, lest its absence go unseen: a count of measurements, which is 0."""
    return Row(name, 0, "measured", None, True, why)


def guarded(name: str, section: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """The section's rows one by one; what it raises becomes a row that fails, and what follows still runs."""
    try:
        yield from section()
    except Exception as error:  # the row and the exit code say it; rows that were taken before stay
        yield all_of(f"{name}_ran", 0, 1, f"{type(error).__name__}: {str(error)[:1000]}")


def must_fail(broken: Row, what: str) -> Row:
    """The row of a negative control: `broken` was measured with `what` broken on purpose and must be red.

    A NaN shows nothing: neither the row nor its control passes.
    """
    detail = f"{what}; {broken.detail}" if broken.detail else what
    failed = broken.gate is not None and not broken.passed and not math.isnan(broken.value)
    return replace(broken, gate=f"not ({broken.gate})", passed=failed, detail=detail)


def document(command: str, rows: Iterable[Row]) -> dict[str, Any]:
    """The JSON form of every `--json` file."""
    return {
        "command": command, "versions": versions(), "hardware": hardware(), "rows": [row.as_json() for row in rows],
    }  # fmt: skip


def write_json(file: Path, command: str, rows: Iterable[Row]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document(command, rows), indent=1, allow_nan=False) + "\n")


def print_rows(rows: Sequence[Row], title: str = "", console: Console | None = None) -> None:
    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, 150)  # a log may be wide, eighty columns would fold every name
    table.add_column("row", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("gate", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("detail", overflow="fold", style="dim")
    for row in rows:
        result = "report" if row.gate is None else "pass" if row.passed else "FAIL"
        mark = Text(result, {"report": "dim", "pass": "green", "FAIL": "bold red"}[result])
        table.add_row(Text(row.name), f"{figure(row.value)} {row.unit}".strip(), row.gate or "", mark, Text(row.detail))
    console.print(table)
    failed = [row.name for row in rows if not row.passed]
    gated = sum(row.gate is not None for row in rows)
    names = f"; failed: {', '.join(failed)}" if failed else ""
    console.print(f"{gated - len(failed)} of {gated} gated rows pass{names}", markup=False, highlight=False)


def write_page(file: Path, title: str, about: str, evidence: dict[str, Any]) -> None:
    """Markdown page of a JSON document, for docs/results/."""
    lines = [f"# {title}", "", about, "", f"Written by `{evidence['command']}`.", "", machine(evidence), ""]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines + page_table(evidence["rows"])) + "\n")


def machine(evidence: dict[str, Any]) -> str:
    found = {**evidence["versions"], **evidence["hardware"]}
    return f"Measured with: {'; '.join(f'{name} {value}' for name, value in found.items())}."


def page_table(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Lines of a Markdown table of rows in their JSON form."""
    lines = ["| row | value | gate | result | detail |", "|---|---|---|---|---|"]
    for row in rows:
        value = "not finite" if row["value"] is None else figure(row["value"])
        result = "reported" if row["gate"] is None else "pass" if row["pass"] else "**FAIL**"
        cells = [row["name"], f"{value} {row['unit']}".strip(), row["gate"] or "", result, row["detail"]]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return lines


def figure(value: float, digits: int = 4) -> str:
    """A number as a person wants to read it: whole from 1,000 on, else so many significant digits."""
    whole = math.isfinite(value) and float(value).is_integer() and abs(value) < 1e15
    return f"{value:,.0f}" if whole or 1000 <= abs(value) < 1e9 else f"{value:.{digits}g}"


@cache
def versions() -> dict[str, str]:
    """Interpreter, packages and commit, found without importing any of them."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    describe = ["git", "describe", "--always", "--dirty"]
    git = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    if git.returncode == 0:
        found["commit"] = git.stdout.strip()
    return found


def hardware() -> dict[str, str]:
    """Processor, cores this process may use, memory, and the accelerators of a torch that is already imported."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = {"cpu": _cpu_name(), "cores": str(os.cpu_count()), "memory_gib": f"{memory / 2**30:.0f}"}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["gpu"] = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return found


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
