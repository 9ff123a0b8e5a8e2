"""Joins what a real model gave on one GPU into docs/results/real_model.json, and writes the page beside it.

    python -m experiments.bench.real_model_page [--run FOLDER --throughput 256=FILE.json --throughput 128=FILE.json]

FOLDER is a run (metrics and audit of each arm), FILE.json is of `bench.throughput` with answers of so many tokens.
Without arguments it writes the page alone. The draft's own figures are in docs/results/smollm2_draft.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from experiments.evidence import at_least, figure, machine, page_table

RESULTS = Path("docs/results")
ARMS = ("regular-k128-s0", "dflash2-k128-s0", "regular-filtered-s0")
COLUMNS = {
    "reward": "rollout/raw_reward", "eval": "eval/reward", "accept": "spec/accept_length",
    "tok/s": "rollout/tokens_per_s", "gap": "train/train_rollout_logprob_abs_diff", "correction": "sc/correction_norm",
    "rollout s": "perf/rollout_time", "train s": "perf/train_time", "weights s": "perf/update_weights_time",
    "step s": "perf/step_time",
}  # fmt: skip
TARGETS = {"k32": 2.5, "k128": 2.4, "filtered": 2.2}  # DFlash2 over regular at eight, capture on
ABOUT = """SmolLM2-135M-Instruct, imported by `models import smollm2`, with a draft that `models train-draft` trained
for it, on sglang 0.5.23 with the plugin and one H200. `tests/sglang_cuda/real_model.sh` starts the servers, measures
their throughput and trains beside them. One run of each; the host was shared with the other servers.

The validation that came before this repository ran a hybrid model of 27B parameters with FlashAttention 3 and checked
650,816 rows. Neither is repeated here: the model is small, attention is Triton's."""
DRAFT = """Accept lengths are of held-out prompts at temperature 1, tokens a verify step, the bonus included.
`expected` is what the training batch predicts."""
THROUGHPUT = """Stop tokens are ignored, so that every answer has its whole length. What a model writes beyond the
end of an answer is not what the draft was trained on, and lowers the accept length of the unfiltered laws below that
of training, whose answers stop at their end; text that repeats itself raises it. sglang draws anew for every request:
ratios of speculative arms, also of capture on and off, compare different texts, and with one to three repeats single
answers decide them. Every repeat is in the detail. `step` is the wall time over the verify steps of the longest one."""
FED = """Training had run on these servers before: each holds the weights that its last arm ended with, `dflash` the
initial ones."""
TRAINING = """Three steps an arm of 42 prompts with 8 answers each, up to 64 at a time, temperature 1, at most 256
tokens; the draft stays what it was. Nine other servers were starting on the same host. The job reached its time limit:
the filtered regular arm ended after its first step, the filtered DFlash2 arm did not begin."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.bench.real_model_page", description=__doc__)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--throughput", action="append", default=[], metavar="TOKENS=FILE")
    args = parser.parse_args()
    file = RESULTS / "real_model.json"
    if args.run:
        file.write_text(json.dumps(join(args.run, dict(one.split("=", 1) for one in args.throughput)), indent=1) + "\n")
    draft = json.loads((RESULTS / "smollm2_draft.json").read_text())
    file.with_suffix(".md").write_text("\n".join(page(draft, json.loads(file.read_text()))) + "\n")


def join(run: Path, throughput: dict[str, str]) -> dict[str, Any]:
    def steps(arm: str) -> list[dict[str, Any]]:
        lines = (run / arm / "metrics.jsonl").read_text().splitlines()
        return [{name: step.get(name) for name in ("step", *COLUMNS.values())} for step in map(json.loads, lines)]

    return {
        "throughput": {tokens: json.loads(Path(file).read_text()) for tokens, file in throughput.items()},
        "arms": {arm: steps(arm) for arm in ARMS},
        "audit": [json.loads((run / arm / "audit.json").read_text()) for arm in ARMS],
    }


def page(draft: dict[str, Any], found: dict[str, Any]) -> list[str]:
    return [
        "# A real model on one H200", "", ABOUT,
        "", "## Draft", "", DRAFT, "", *draft_section(draft),
        "", "## Throughput", "", THROUGHPUT, "", *targets(found),
        *(line for tokens, evidence in found["throughput"].items() for line in speeds(tokens, evidence)),
        "", "## Training", "", TRAINING, "", *training(found["arms"]),
        "", "### Audit", "", *audit(found["audit"]),
    ]  # fmt: skip


def draft_section(draft: dict[str, Any]) -> list[str]:
    held = draft["held_out"]
    lengths = [f"| {name.split('/', 1)[1]} | {held[name]:.2f} |" for name in held if name.startswith("accept_length/")]
    rounds = [
        f"| {one['round']} | {one['step']:,} | {one['loss']:.2f} | {one['expected_accept_length']:.2f} "
        f"| {one['seconds']:.0f} |"
        for one in draft["rounds"]
    ]
    return [
        f"Written by `{draft['command']}`.", "", f"Measured with: torch {draft['versions']['torch']}.", "",
        f"| verify / block, {held['prompts']} prompts | accept length |", "|---|---|", *lengths,
        "", "| round | step | loss | expected | seconds |", "|---|---|---|---|---|", *rounds,
    ]  # fmt: skip


def targets(found: dict[str, Any]) -> list[str]:
    """DFlash2 over regular at eight, judged for each length."""
    rows = []
    for tokens, evidence in found["throughput"].items():
        by_name = {row["name"]: row for row in evidence["rows"]}
        for law, least in TARGETS.items():
            row = by_name[f"throughput/dflash2_over_regular {law} x8"]
            accept = by_name[f"throughput/accept dflash2 {law} x8"]
            repeats = row["detail"].count(",") + 1
            detail = f"{repeats} repeats: {row['detail']}" if repeats > 1 else "1 repeat"
            name = f"dflash2_over_regular {law} x8, {tokens} tokens"
            rows.append(
                at_least(name, row["value"], least, "x", f"{detail}; accept length {accept['detail']}").as_json()
            )
    missed = sum(not row["pass"] for row in rows)
    return [
        f"Targets, capture on, eight answers at once: {missed} of {len(rows)} are missed, each law's at one length at "
        "least; a single repeat that passes is no proof.", "", *page_table(rows),
    ]  # fmt: skip


def speeds(tokens: str, evidence: dict[str, Any]) -> list[str]:
    rows = [{**row, "name": row["name"].removeprefix("throughput/")} for row in evidence["rows"]]
    return [
        "", f"### {tokens} tokens", "", *([FED, ""] if tokens == "128" else []),
        f"Written by `{evidence['command']}`, its `LENGTH` being {tokens}.", "", machine(evidence),
        "", *page_table(rows),
    ]  # fmt: skip


def training(arms: dict[str, list[dict[str, Any]]]) -> list[str]:
    lines = [f"| arm | step | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for arm, steps in arms.items():
        for step in steps:
            values = ["" if step[name] is None else figure(step[name], 3) for name in COLUMNS.values()]
            lines.append(f"| {arm} | {step['step'] + 1} | {' | '.join(values)} |")
    pairs = zip(arms["regular-k128-s0"], arms["dflash2-k128-s0"], strict=True)
    speedups = ", ".join(f"{two[COLUMNS['tok/s']] / one[COLUMNS['tok/s']]:.2f}" for one, two in pairs)
    return [*lines, "", f"DFlash2 over regular in tokens a second, step by step: {speedups}."]


def audit(documents: list[dict[str, Any]]) -> list[str]:
    rows = [row for document in documents for row in document["rows"]]
    failed = [row["name"] for row in rows if not row["pass"]]
    return [
        f"{sum(row['gate'] is not None for row in rows) - len(failed)} of "
        f"{sum(row['gate'] is not None for row in rows)} gated rows pass; failed: {', '.join(failed) or 'none'}.",
        "", f"Written by `{documents[0]['command']}`.", "", machine(documents[0]), "", *page_table(rows),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
