"""Shows the plugin on running servers (see `servers`), and writes what was found as JSON (see `page`).

python -m tests.sglang_cuda.show FOLDER OUT.json [--device cpu] [--parts rows,law] [--small] [--commit ID]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from experiments.evidence import Row, document, print_rows, report
from miles_ext.capability import ArmKind
from tests.sglang_cpu.server import Server
from tests.sglang_cuda import models, show_cost, show_law, show_refusals, show_rows, show_updates
from tests.sglang_cuda.servers import KINDS, attach

ARMS: tuple[ArmKind, ...] = ("regular", "dflash", "dflash2")
PARTS = ("rows", "law", "refusals", "updates", "memory", "cost")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--laws", default=",".join(show_law.CASES))
    parser.add_argument("--samples", type=int, default=5120, help="responses a law and arm")
    parser.add_argument("--costs", default="", help="servers of the part cost; those of models without it")
    parser.add_argument("--seconds", type=float, default=40, help="rounds of the part cost start this long, a server")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    noted = attach(options.folder)
    servers = {
        name: Server(str(fields["url"]), cast(Any, None), options.folder / f"{name}.log")
        for name, fields in noted.items()
    }
    found = [report(f"servers/{name}", float(fields["seconds"]), "s to health") for name, fields in noted.items()]
    for part in options.parts.split(","):
        found += run(part, servers, options)
        save(options.out, found, options.commit)
    print_rows(found)
    return int(not all(row.passed for row in found))


def run(part: str, servers: dict[str, Server], options: argparse.Namespace) -> list[Row]:
    device, small = options.device, options.small
    arms: dict[ArmKind, Server] = {arm: servers[arm] for arm in ARMS if arm in servers}
    first = time.monotonic()
    found: list[Row] = []
    if part == "rows":
        for arm, server in arms.items():
            found += attempt(f"{part}/{arm}", show_rows.rows, server, arm, device, 4 if small else 64)
    elif part == "law":
        found += attempt(part, show_law.rows, arms, options.laws.split(","), options.samples, device)
    elif part == "refusals":
        for arm, server in arms.items():
            found += attempt(f"{part}/{arm}", show_refusals.rows, server, arm)
        if "no_verifier" in servers:
            found += attempt(f"{part}/no verifier", show_refusals.without_verifier, servers["no_verifier"])
    elif part == "updates":
        for arm, server in arms.items():
            found += attempt(f"{part}/{arm}", show_updates.rows, server, arm, device)
    elif part == "memory":
        if "memory_saver" in servers:
            found += attempt(part, show_updates.memory, servers["memory_saver"])
    else:
        chosen = options.costs.split(",") if options.costs else [n for n in servers if KINDS[n].model != "tiny"]
        for name in chosen:
            if name in servers and not name.startswith("stock"):
                kind = KINDS[name]
                stock = servers.get(f"stock_{kind.model}") if kind.arm == "regular" else None
                vocabulary, length = models.vocabulary(options.folder, kind.model), 16 if small else 256
                found += attempt(
                    f"{part}/{name}", show_cost.rows, servers[name], name, length, vocabulary, options.seconds, stock
                )
    print(f"{part}: {time.monotonic() - first:.0f} s", flush=True)
    return found


def attempt(name: str, part: Callable[..., list[Row]], *arguments: Any) -> list[Row]:
    """What a part found; a part that breaks is a row that failed."""
    try:
        return part(*arguments)
    except Exception as error:
        traceback.print_exc()
        return [Row(name, float("nan"), "", "runs", False, f"{type(error).__name__}: {error}"[:600])]


def save(file: Path, found: list[Row], commit: str) -> None:
    command = "python -m tests.sglang_cuda.show " + " ".join(sys.argv[1:])
    written = document(command, found)
    if commit:
        written["versions"]["commit"] = commit
    written["versions"]["torch"] = torch.__version__
    file.write_text(json.dumps(written, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
