"""`validate --mutate`: break one guarded line at a time in a scratch copy, and expect the named row to go red."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml
from rich.console import Console

from experiments.evidence import Row, all_of, document, write_page

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutations.yaml")
PAGE = Path("docs/results/mutations.md")
COPIED = ("miles_ext", "rollout", "trainer", "experiments", "tests/data")
TIMEOUT_S = 600.0
ABOUT = """Each fault below was put into a scratch copy of the tree, alone, and the named row of the proof table was run
with `--quick`. A fault is caught when that row goes red. The unbroken copy was run first and passed every row."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """Replace the only occurrence of `old` in `file` by `new`; the proof table's `row` goes red."""

    name: str
    row: str
    file: str
    old: str
    new: str


def load(file: Path = LIST) -> list[Mutation]:
    return [Mutation(**entry) for entry in yaml.safe_load(file.read_text())]


def mutate(engine: str) -> list[Row]:
    """Run every mutation; the first row is the unbroken copy. Writes docs/results/mutations.md."""
    mutations, console = load(), Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="mutate-") as scratch:
        tree = Path(scratch) / "tree"
        copy_tree(tree)
        names = list(dict.fromkeys(mutation.row for mutation in mutations))
        red = red_rows(tree, names, engine)
        found = [all_of("mutations/unbroken", len(names) - len(red), len(names), "; ".join(red) or ", ".join(names))]
        for mutation in mutations:
            started = time.perf_counter()
            row = attempt(tree, mutation, engine)
            found.append(row)
            outcome = "caught" if row.passed else "MISSED"
            console.print(f"{outcome} {mutation.name} ({time.perf_counter() - started:.0f} s)", highlight=False)
    write_page(PAGE, "Mutations", ABOUT, document("python -m experiments validate --mutate", found))
    return found


def copy_tree(tree: Path) -> None:
    for name in COPIED:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))


def attempt(tree: Path, mutation: Mutation, engine: str) -> Row:
    """Apply, run the row, restore."""
    file = tree / mutation.file
    text = file.read_text()
    change = f"{mutation.file}: `{mutation.old.strip()}` becomes `{mutation.new.strip()}`"
    occurrences = text.count(mutation.old)
    if occurrences != 1:
        detail = f"{change}; found {occurrences} times, must be once: mend mutations.yaml"
        return Row(f"mutations/{mutation.name}", occurrences, "occurrences", "row goes red", False, detail)
    file.write_text(text.replace(mutation.old, mutation.new))
    try:
        red = red_rows(tree, [mutation.row], engine)
    finally:
        file.write_text(text)
    detail = f"{change}; row {mutation.row}: {', '.join(red[:4])}{' ...' if len(red) > 4 else ''}"
    return Row(f"mutations/{mutation.name}", len(red), "red", f"{mutation.row} goes red", bool(red), detail)


def red_rows(tree: Path, names: list[str], engine: str) -> list[str]:
    """Names of the rows that fail in that tree, controls that no longer fail among them."""
    out = tree / "rows.json"
    out.unlink(missing_ok=True)
    options = ["--engine", engine, "--quick", "--json", str(out)]
    command = [sys.executable, "-m", "experiments", "validate", *names, *options]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    run = {"cwd": tree, "env": environment, "capture_output": True, "text": True, "timeout": TIMEOUT_S}
    done = subprocess.run(command, check=False, **run)
    if not out.exists():
        raise RuntimeError(f"validate {' '.join(names)} exited with {done.returncode}, no rows: {done.stderr[-800:]}")
    rows = json.loads(out.read_text())["rows"]
    return [row["name"] for row in rows if not row["pass"]]
