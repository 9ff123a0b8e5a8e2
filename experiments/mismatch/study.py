"""`python -m experiments mismatch`: the whole study on this machine, and its page."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from experiments.compare import compare
from experiments.config import ArmConfig, ExperimentConfig, load, save
from experiments.evidence import Row, all_of, document, print_rows, write_json
from experiments.joined import Joined
from experiments.mismatch.findings import exact_rows, family_rows
from experiments.mismatch.page import write_page
from experiments.mismatch.runs import run_chain

CONFIG = Path(__file__).parents[1] / "configs" / "mismatch.yaml"
PAGE = Path("docs/results/mismatch.md")
CHAIN_SEEDS, CHAIN_STEPS = range(6), 150
ADDITION, PROCESSES = "addition", 2


def study(folder: Path, *, quick: bool, minutes: float, say: Callable[[str], None]) -> int:
    """Run what is not in `folder` yet, compare, and write the page; 0 where nothing failed and what is exact holds.

    Chain runs, then the arms of mismatch.yaml, seeds side by side. The whole study writes docs/results/mismatch.md and
    .json; quick: two minutes, and `folder`/mismatch.md. minutes: when sampling ends; what is left undone is named.
    """
    started = time.monotonic()
    if not (folder / "chain").exists():
        seeds, steps = (range(3), 80) if quick else (CHAIN_SEEDS, CHAIN_STEPS)
        run_chain(folder / "chain", list(seeds), steps, say, quick=quick)
    chain = compare([folder / "chain"], folder / "compare-chain")
    config = load(CONFIG)
    if not (folder / ADDITION).exists():
        run_addition(folder, quick, started + 60 * minutes, say)
    addition = compare([folder / ADDITION], folder / "compare-addition")
    wanted = [arm.name for arm in (config.arms[:2] if quick else config.arms)]
    rows = [*accounted("chain", chain), *accounted("addition", addition), *exact_rows(chain),
            *family_rows("chain", chain), *family_rows("addition", addition)]  # fmt: skip
    print_rows([row for row in rows if row.gate], "mismatch")
    command = f"python -m experiments mismatch{' --quick' if quick else ''}"
    page = folder / PAGE.name if quick else PAGE
    write_json(page.with_suffix(".json"), command, rows)
    write_page(page, document(command, rows), chain, addition, wanted)
    say(f"{page}, {folder}/compare-chain/report.html, {folder}/compare-addition/report.html")
    return int(not all(row.passed for row in rows))


def accounted(name: str, joined: Joined) -> list[Row]:
    """Every run of the folder is in the report; those that did not finish, or are no pair, are named."""
    finished = sum(run.state == "finished" for run in joined.runs)
    return [
        all_of(f"{name}/runs", finished, len(joined.runs), "; ".join(joined.left_out[:8]) or "all finished", "runs")
    ]


def run_addition(folder: Path, quick: bool, deadline: float, say: Callable[[str], None]) -> None:
    """Arms of mismatch.yaml, as `experiments run` makes them but without Ray, `PROCESSES` at a time.

    deadline: by time.monotonic; what has not begun then is left out.
    """
    settings = [("wandb_mode", "disabled"), ("output_dir", str(folder)), ("name", ADDITION)]
    config = load(CONFIG, settings + (quick_settings() if quick else []))
    save(config)
    work = [(config, arm, seed, deadline) for arm in config.arms for seed in config.seeds]
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
        for number, line in enumerate(pool.map(run_one, work), 1):
            say(f"addition {number}/{len(work)} {line}")


def run_one(work: tuple[ExperimentConfig, ArmConfig, int, float]) -> str:
    from experiments.arms import run_arm
    from experiments.local import LocalPool, LocalTrainer

    config, arm, seed, deadline = work
    if time.monotonic() > deadline:
        return f"{arm.name}-s{seed}: time was up"
    said: list[str] = []
    run_arm(config, arm, seed, said.append, debug=False, make_pool=LocalPool, make_trainer=LocalTrainer)
    return said[-1]


def quick_settings() -> list[tuple[str, str]]:
    """The first pair of arms, two steps each: that the parts fit, not what they show."""
    arms = [arm.model_dump(mode="json") for arm in load(CONFIG).arms[:2]]
    return [("arms", json.dumps(arms)), ("seeds", "[0]"), ("steps", "2"), ("task.eval_problems", "8")]
