"""Joins what runs of `show` and of the tests wrote into one JSON document, and writes its page beside it.

    python -m tests.sglang_cuda.page docs/results/h200.json [PART.json | PYTEST.log ...]

Without parts it writes the page alone. Parts replace nothing: every row of each is kept, failures included. Beside
h200.json lie h200_cost.json, of `show_cost`, and h200_kernels.json, of `bench_kernels`: sections of the same page.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from experiments.evidence import all_of, machine, page_table

COST = """Eight concurrent responses of 256 tokens, on servers of SmolLM2-135M with a draft that was trained for it,
and on sglang without the plugin (`stock`); the other arms' servers were up on the same GPU and host, idle. The prompts
are random tokens, which the draft was not trained for. `off` and `on` alternate on one server; `loss` is the median
over pairs of neighbours, all of which are listed, and `overhead` compares a server that captures nothing with stock."""
KERNELS = """Without sglang: a step of eight requests in the sampler (8 rows) and a verifier (64), and laws in float64.
Measured before cutoffs were found with three thresholds a sum and blocks were loaded ahead; the kernels as they are now
were compared with torch on an H200 again, and not timed there. `added` is what capture adds to a step."""
FIRST = """Measured before law, draw and packing became one Triton launch each; the sections above are newer.

- `functions` are the tests of `tests/sglang_cuda`.
- `capability`, `rows`, `float64`, `law`, `support`, `refusals` and `updates` are of the tiny pair that ships, in
  bfloat16. `float64` compares recorded rows with transformers in float64 on the same weights, and reports what
  bfloat16 leaves. `law` compares arms with each other (chi-square over two tokens) and tokens with the rows recorded
  beside them. Arms run different kernels: where two logits are equal in bfloat16 in one of them and not in the other,
  at a cutoff, their supports differ in that context, `support` names it, and the chi-square between arms sees it.
- `cost` and `loss` are of eight concurrent responses of 256 tokens in interleaved rounds, of which the first is
  dropped; medians of the others, all of which are listed. The servers of all arms were up, idle, on the same GPU.
  `135m` is a random Qwen3 with the shape of a small model (30 layers, hidden 576, vocabulary 49,152), `wide` one with
  a vocabulary of 151,936, `stock` is sglang without the plugin, and `overhead` compares with it."""
SECTIONS = (
    ("What capture costs on a real model", "_cost", COST),
    ("Kernels", "_kernels", KERNELS),
    ("All arms, first version", "", FIRST),
)


def main(file: Path, parts: list[Path]) -> None:
    if parts:
        file.write_text(json.dumps(join(parts), indent=1) + "\n")
    lines = ["# One H200", "", "The sglang 0.5.23 plugin on one H200. Failed rows are kept."]
    for heading, suffix, about in SECTIONS:
        source = file.with_stem(file.stem + suffix)
        if source.exists():
            lines += ["", *section(heading, about, json.loads(source.read_text()))]
    file.with_suffix(".md").write_text("\n".join(lines) + "\n")


def section(heading: str, about: str, evidence: dict[str, Any]) -> list[str]:
    rows = evidence["rows"]
    failed, gated = sum(not row["pass"] for row in rows), sum(row["gate"] is not None for row in rows)
    return [
        f"## {heading}", "", about, "", f"{failed} of {gated} gated rows fail.", *noise(rows),
        "", f"Written by `{evidence['command']}`.", "", machine(evidence), "", *page_table(rows),
    ]  # fmt: skip


def noise(rows: list[dict[str, Any]]) -> list[str]:
    """How far the same work went apart: `K32 off` and `K128 off` sample alike and record nothing."""
    rate = {row["name"].removeprefix("cost/"): row["value"] for row in rows}
    same = [
        f"{name} {rate[f'{arm} K32 {kind}']:,.0f} and {rate[f'{arm} K128 {kind}']:,.0f}"
        for name, arm, kind in (("regular", "regular", "off"), ("stock", "regular", "stock"),
                                ("dflash", "dflash", "off"), ("dflash2", "dflash2", "off"))
        if f"{arm} K128 {kind}" in rate
    ]  # fmt: skip
    if not same:
        return []
    step = [8000 / rate[f"regular {case} off"] for case in ("K32", "K128")]
    return [
        "", "`K32 off` and `K128 off` are the same work, and so are their `stock`. They gave, in tokens a second: "
        f"{', '.join(same)}; a step of the regular arm took {min(step):.1f} to {max(step):.1f} ms. The two sides of a "
        "`loss` were measured one after the other; differences between cases, and `overhead`, are no better than that.",
    ]  # fmt: skip


def join(parts: list[Path]) -> dict[str, Any]:
    documents = [tests(part) if part.suffix == ".log" else json.loads(part.read_text()) for part in parts]
    first = next(document for document in documents if document["versions"])
    return {
        "command": "; ".join(document["command"] for document in documents),
        "versions": first["versions"],
        "hardware": first["hardware"],
        "rows": [row for document in documents for row in document["rows"]],
    }


def tests(log: Path) -> dict[str, Any]:
    """One row of a pytest log."""
    text = log.read_text()
    failed = re.findall(r"^FAILED (\S+)", text, re.MULTILINE)
    passed = int(re.findall(r"(\d+) passed", text)[-1])
    names = f"failed: {', '.join(name.split('::')[-1] for name in failed)}" if failed else ""
    row = all_of("functions/tests", passed, passed + len(failed), names)
    command = "python -m pytest --confcutdir=tests/sglang_cuda tests/sglang_cuda"
    return {"command": command, "versions": {}, "hardware": {}, "rows": [row.as_json()]}


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(part) for part in sys.argv[2:]])
