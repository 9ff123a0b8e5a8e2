"""One line a step: written by the run, drawn as progress bars by whoever follows it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

# Word on the line, metric, format.
SHOWN = (
    ("reward", "rollout/raw_reward", ".3f"),
    ("accept", "spec/accept_length", ".2f"),
    ("tok/s", "rollout/tokens_per_s", ",.0f"),
    ("gap", "train/train_rollout_logprob_abs_diff", ".1e"),
    ("correction", "sc/correction_norm", ".1e"),
    ("seconds", "perf/step_time", ".1f"),
    ("eval", "eval/reward", ".3f"),
)
_STEP = re.compile(r"\[(?P<run>\S+) +(?P<step>\d+)/(?P<steps>\d+)\] (?P<text>.*)")


def step_line(run: str, step: int, steps: int, metrics: Mapping[str, float]) -> str:
    """`[dflash2-s0  3/40] reward 0.61 accept 4.41 ...`; step counts from 1."""
    words = [f"{word} {metrics[name]:{form}}" for word, name, form in SHOWN if name in metrics]
    return f"[{run} {step:>{len(str(steps))}}/{steps}] {'  '.join(words)}"


class Follower:
    """Shows lines as they come: in a terminal the steps become one bar a run, elsewhere every line is printed.

    Example: with Follower(Console()) as follower: follower.line(step_line("regular-s0", 1, 40, metrics))
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, TextColumn("{task.fields[text]}"), console=console)
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def line(self, text: str) -> None:
        found = _STEP.fullmatch(text)
        if found is None or not self._console.is_terminal:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        run, total = found["run"], int(found["steps"])
        if run not in self._bars:
            self._bars[run] = self._progress.add_task(run, total=total, text="")
        self._progress.update(self._bars[run], completed=int(found["step"]), text=found["text"])
