"""Joins what runs of `show` and of the tests wrote into one JSON document, and writes its page beside it.

    python -m tests.sglang_cuda.page docs/results/h200.json [PART.json | PYTEST.log ...]

Without parts it writes the page alone. Parts replace nothing: every row of each is kept, failures included.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from experiments.evidence import all_of, write_page

ABOUT = """The sglang 0.5.23 plugin on one H200.

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


def main(file: Path, parts: list[Path]) -> None:
    if parts:
        file.write_text(json.dumps(join(parts), indent=1) + "\n")
    write_page(file.with_suffix(".md"), "One H200", ABOUT, json.loads(file.read_text()))


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
