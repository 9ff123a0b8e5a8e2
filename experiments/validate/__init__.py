"""The proof table: every exactness claim as a row that recomputes its own evidence, with controls that must fail."""

from __future__ import annotations

import importlib
import shlex
import tempfile
import time
from json import JSONDecodeError
from json import loads as parse  # `json` is the name of an option here
from pathlib import Path

from rich.console import Console

from experiments.evidence import Row, document, print_rows, write_json, write_page
from experiments.validate.engines import Engines
from experiments.validate.settings import Context

# In the order of the table; each is a module here with `rows(context) -> list[Row]`, and `start(context)` perhaps.
ROWS = (
    "filters", "alignment", "verifier", "reference", "law", "estimator", "centering", "control", "forwards",
    "collection", "refusals", "handoff", "integration", "throughput",
)  # fmt: skip
ENGINES = ("embedded", "sglang")
PAGE = Path("docs/results/validation.md")
SGLANG_CONFIG = Path("experiments/configs/sglang_cpu.yaml")


def main(
    rows: list[str], engine: str = "embedded", quick: bool = False, mutate: bool = False,
    json: Path | None = None, cases: Path | None = None, config: Path | None = None, servers: Path | None = None,
) -> int:  # fmt: skip
    """Run the named rows (all without a name), print them; 1 where a gate failed.

    json: where to write the machine form. cases: file for `filters` or `estimator`. config, servers: see
    `on_sglang.servers`, for the engine sglang. The full table of all rows of the embedded engine also writes
    docs/results/validation.md; `mutate` breaks guarded lines instead and writes docs/results/mutations.md.
    ValueError for a row or an engine that does not exist.
    """
    unknown = sorted(set(rows) - set(ROWS))
    if unknown:
        raise ValueError(f"rows {unknown} do not exist; accepted: {', '.join(ROWS)}")
    if engine not in ENGINES:
        raise ValueError(f"engine is {engine!r}; accepted: {', '.join(ENGINES)}")
    if cases is not None and not (len(rows) == 1 and rows[0] in ("filters", "estimator") and cases.is_file()):
        raise ValueError(f"--cases {cases} needs one row, filters or estimator, and a file that exists")
    if cases is not None:
        _require_cases(cases)
    if engine == "embedded" and (config is not None or servers is not None):
        raise ValueError("--config and --servers are of --engine sglang; leave them out")
    if mutate:
        return _mutate(engine, json)
    chosen = [name for name in ROWS if name in rows or not rows]
    command = _command(rows, engine, quick, json, cases, config, servers)
    with tempfile.TemporaryDirectory(prefix="validate-") as scratch:
        engines = _engines(engine, Path(scratch), config, servers)
        try:
            found = run(chosen, Context(engines, quick, cases, Path(scratch)))
        finally:
            engines.close()
    print_rows(found, command)
    if json is not None:
        write_json(json, command, found)
    if not rows and not quick and engine == "embedded":
        write_page(PAGE, "Validation", __doc__ or "", document(command, found))
    return int(not all(row.passed for row in found))


def _require_cases(file: Path) -> None:
    try:
        found = parse(file.read_text())
    except JSONDecodeError as error:
        raise ValueError(f"--cases {file} is not JSON ({error}); accepted: the form of tests/data/*.json") from error
    if not (isinstance(found, dict) and isinstance(found.get("cases"), list) and found["cases"]):
        raise ValueError(f'--cases {file} holds no list "cases"; accepted: the form of tests/data/*.json')


def _mutate(engine: str, json: Path | None) -> int:
    from experiments.validate.mutate import mutate

    found = mutate(engine)
    print_rows(found, "mutations")
    if json is not None:
        write_json(json, "python -m experiments validate --mutate", found)
    return int(not all(row.passed for row in found))


def run(names: list[str], context: Context) -> list[Row]:
    """The rows of each name in turn; one that raises is a failed row, and the table goes on."""
    console, found = Console(stderr=True), []
    modules = {name: importlib.import_module(f"experiments.validate.{name}") for name in names}
    try:
        for module in modules.values():
            if hasattr(module, "start"):  # what runs in a process of its own runs beside the other rows
                module.start(context)
        for name, module in modules.items():
            started = time.perf_counter()
            try:
                found += module.rows(context)
            except Exception as error:
                console.print_exception()
                found.append(Row(f"{name}/error", float("nan"), "", "runs", False, f"{type(error).__name__}: {error}"))
            console.print(f"{name}: {time.perf_counter() - started:.1f} s", style="dim", highlight=False)
    finally:
        for process in context.running.values():
            process.terminate()
            process.wait()
    return found


def _engines(name: str, scratch: Path, config: Path | None, servers: Path | None) -> Engines:
    if name == "embedded":
        from experiments.validate.embedded import EmbeddedEngines

        return EmbeddedEngines(scratch)
    from experiments.validate.on_sglang.engines import SglangEngines
    from experiments.validate.on_sglang.servers import read_config

    return SglangEngines(scratch, read_config(config or SGLANG_CONFIG), servers)


def _command(
    rows: list[str], engine: str, quick: bool, json: Path | None, cases: Path | None, config: Path | None,
    servers: Path | None,
) -> str:  # fmt: skip
    parts = ["python", "-m", "experiments", "validate", *rows, "--engine", engine]
    parts += ["--quick"] if quick else []
    for name, file in {"cases": cases, "config": config, "servers": servers, "json": json}.items():
        parts += [f"--{name}", str(file)] if file else []
    return shlex.join(parts)
