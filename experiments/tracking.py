"""Tracking of one arm: metrics.jsonl always, Weights & Biases beside it."""

from __future__ import annotations

import json
import math
import os
import queue
import secrets
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TextIO, get_args

WandbMode = Literal["offline", "online", "disabled"]
METRICS_FILE = "metrics.jsonl"
# Every namespace of a metric name, and the key W&B draws it against.
STEP_KEYS = {"train": "train/step", "sc": "train/step", "alarm": "train/step"} | {
    name: "rollout/step" for name in ("rollout", "spec", "handoff", "perf", "eval")
}
WALL_CLOCK = ("perf/", "rollout/tokens_per_s", "handoff/seconds")
"""Beginnings of the names of metrics that a clock or a process size decides: what differs between equal runs."""
_FINISH_TIMEOUT_S = 60.0


def default_mode() -> WandbMode:
    """WANDB_MODE where it is set, else online beside a WANDB_API_KEY, else offline."""
    asked = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
    for mode in get_args(WandbMode):
        if asked == mode:
            return mode
    raise ValueError(f"WANDB_MODE is {asked!r}; accepted: {', '.join(get_args(WandbMode))}; correct or unset it")


class Tracker:
    """Writes the metrics of one arm and seed; the only writer of both.

    run_dir: the arm's folder; W&B files land in run_dir/wandb. config: the resolved config.
    wandb_mode: None follows `default_mode`. wandb_id: of the run to continue, None for a new one; keep `.wandb_id` in
    the checkpoint. tags: words to find the run by. W&B lives on a thread of its own, so that neither its slow import
    nor its failure (said once on stderr, kept in `.wandb_error`) ever holds up or ends a run.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        experiment: str,
        arm: str,
        seed: int,
        config: Mapping[str, Any],
        wandb_mode: WandbMode | None = None,
        wandb_id: str | None = None,
        tags: tuple[str, ...] = (),
        project: str = "score-centering",
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        self.wandb_id = wandb_id or secrets.token_hex(4)
        self.wandb_error = ""
        self.non_finite = 0
        self._file = (run_dir / METRICS_FILE).open("a")
        self._queue: queue.SimpleQueue[dict[str, float] | bool] = queue.SimpleQueue()
        self._settings: dict[str, Any] = {
            "project": project, "group": experiment, "job_type": arm, "name": f"{experiment}-{arm}-s{seed}",
            "tags": [*tags, arm], "config": dict(config), "id": self.wandb_id, "mode": wandb_mode or default_mode(),
            "dir": str(run_dir), "resume": "allow", "reinit": "create_new",
        }  # fmt: skip
        self._thread = threading.Thread(target=self._run_wandb, name="wandb", daemon=True)
        if self._settings["mode"] != "disabled":
            self._thread.start()

    @property
    def wandb_dir(self) -> Path:
        """Folder of the W&B runs of this arm (one a resume), for `wandb sync`."""
        return self.run_dir / "wandb"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line for `step`; values that are not finite are written as words and counted, never dropped."""
        finite = {name: float(value) for name, value in metrics.items()}
        unknown = sorted(name for name in finite if name.split("/")[0] not in STEP_KEYS or "/" not in name)
        if unknown:
            raise ValueError(
                f"metric names {unknown} have no known namespace; accepted: {', '.join(STEP_KEYS)} + '/...'"
            )
        write_line(self._file, step, finite)
        self.non_finite += sum(not math.isfinite(value) for value in finite.values())
        self._queue.put({"train/step": step, "rollout/step": step, **finite})

    def finish(self, failed: bool = False) -> None:
        """Close both; W&B gets a minute to write what it holds."""
        self._file.close()
        self._queue.put(failed)
        if self._thread.is_alive():
            self._thread.join(_FINISH_TIMEOUT_S)
            if self._thread.is_alive():
                self._report_wandb(f"did not finish within {_FINISH_TIMEOUT_S:.0f} s")

    def _run_wandb(self) -> None:
        try:
            import wandb  # seconds to import: only here, off the main thread

            run = wandb.init(settings=wandb.Settings(silent=True, console="off"), **self._settings)
            for name, key in STEP_KEYS.items():
                run.define_metric(key, hidden=True)
                run.define_metric(f"{name}/*", step_metric=key)
            while not isinstance(item := self._queue.get(), bool):
                run.log(item)
            run.finish(exit_code=int(item))
        except Exception as error:  # noqa: BLE001  whatever W&B raises, the run goes on
            self._report_wandb(f"{type(error).__name__}: {error}")

    def _report_wandb(self, reason: str) -> None:
        self.wandb_error = reason
        print(f"W&B stopped ({reason}); {METRICS_FILE} goes on without it", file=sys.stderr)


def write_line(file: TextIO, step: int, metrics: Mapping[str, float]) -> None:
    """One JSON object and a flush. JSON has no NaN: such values become 'nan', 'inf' or '-inf', which float() reads."""
    words = {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
    non_finite = sum(isinstance(value, str) for value in words.values())
    file.write(json.dumps({"step": step, **words, **({"non_finite": non_finite} if non_finite else {})}) + "\n")
    file.flush()


def read_metrics(run_dir: Path) -> dict[str, dict[int, float]]:
    """{name: {step: value}} of an arm's metrics.jsonl; a step logged again (after a resume) keeps its last value.

    A last line cut short by a crash is left out. Raises ValueError for any other line that is not JSON.
    """
    series: dict[str, dict[int, float]] = {}
    lines = (run_dir / METRICS_FILE).read_text().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise ValueError(f"{run_dir / METRICS_FILE} line {number} is not JSON; restore the file") from error
        step = record.pop("step")
        for name, value in record.items():
            series.setdefault(name, {})[step] = float(value)
    return series
