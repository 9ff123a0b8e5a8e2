"""Writes docs/results/estimator.md from the JSON files that `bench estimator` left there.

python -m experiments.bench.estimator_page
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.evidence import machine, page_table

PAGE = Path("docs/results/estimator.md")
SOURCES = {"One H200": "estimator_h200.json", "Processor, one thread": "estimator_cpu.json"}
ABOUT = """What the estimator costs, measured by `bench estimator` beside what is predicted.

Prediction. Forward reads each logit once; backward reads it again and writes its gradient. That is 6 bytes a bfloat16
logit, 12 a float32 one, and two exponentials. The floor is the time of the larger: of the bytes at the bandwidth of a
plain copy, and on a processor of the exponentials at their rate in cache, both measured in the same run. On a GPU the
exponentials are the smaller part. Rows `floor_over_...` hold the prediction, the measurement and its range; 1 is the
floor. K entries of support add a few kilobytes and about as many operations a token as entries, hence the target of
1.02 for `centered_over_plain`, whose denominator is the same kernels at K = 0.

`consuming` steps write the gradient over the logits, as the trainer does with logits of its own. `fastest_` rows
repeat the judged rows under the fastest launches of the table that the same run timed; each row names its launch, as
`b` block, `w` warps, `p` programs, the eviction hint (`plain`: none) and `s` stages. A judged row without `fastest_`
was taken with what shipped during the run. `commit` names the checkout that was measured; with `-dirty`, files of a
later one lay over it. `0 measured` stands where there is no figure, with the reason: a peer that is absent or raised
is kept."""
SECTIONS = (
    ("Judged", lambda name: "peer" not in name and not is_launch(name)),
    ("Peers, on the work that they can do", lambda name: "peer" in name),
    ("Launches of the kernels", lambda name: is_launch(name)),
)


def is_launch(name: str) -> bool:
    return name.startswith(("estimator/cuda_scan", "estimator/cuda_gradient"))


def bound(rows: list[dict[str, Any]]) -> list[str]:
    """What keeps an eager step on a GPU from the floor, where the run measured it, in the run's own figures."""
    value = {row["name"].removeprefix("estimator/cuda_"): row["value"] for row in rows}
    if not {"floor_over_graph", "host"} <= value.keys():
        return []
    failed = [row["name"] for row in rows if not row["pass"]]
    return [
        "", "### What bounds a step", "",
        "The host: it needs "
        f"{value['host'] / 1e3:.2f} ms to queue the launches of one eager step at V = 151,936 and K = 128, which then "
        f"reaches {value['floor_over_centered_v151936_k128']:.2f} of the floor. Replayed from a CUDA graph, the same "
        f"step reaches {value['floor_over_graph']:.2f}. Both were taken with the launches that shipped during the run. "
        f"With the fastest, the eager step reaches {value['floor_over_centered_fastest_v151936_k128']:.2f}, and "
        f"{value['floor_over_centered_fastest_v248320_k128']:.2f} at V = 248,320, whose kernels have more to do for "
        "the same launches; a graph of them was not timed.",
        "", f"{len(failed)} of {sum(row['gate'] is not None for row in rows)} gated rows fail, all of them kept below.",
    ]  # fmt: skip


def page(documents: dict[str, dict[str, Any]]) -> str:
    """Markdown of documents by heading. Rows of a gate come first as they were taken, then peers, then launches."""
    lines = ["# Estimator", "", ABOUT]
    for heading, evidence in documents.items():
        lines += ["", f"## {heading}", "", f"Written by `{evidence['command']}`.", "", machine(evidence)]
        lines += bound(evidence["rows"])
        for title, belongs in SECTIONS:
            rows = [row for row in evidence["rows"] if belongs(row["name"])]
            if rows:
                lines += ["", f"### {title}", "", *page_table(rows)]
    return "\n".join(lines) + "\n"


def main() -> None:
    found = {heading: PAGE.parent / name for heading, name in SOURCES.items()}
    PAGE.write_text(page({heading: json.loads(file.read_text()) for heading, file in found.items() if file.exists()}))
    print(PAGE)


if __name__ == "__main__":
    main()
