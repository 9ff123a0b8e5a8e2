"""Which run to go on with: a new one, the last of its name, or the one in a folder. One driver a run at a time."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.artifacts import write_whole
from experiments.config import CONFIG_FILE, ExperimentConfig, dump, load, numbered, save

# Settings that change no token and no weight: what a run may be continued under.
MAY_DIFFER = (
    "name", "output_dir", "wandb_mode", "wandb_project", "checkpoint.", "alarms.", "trainer.timeout_s",
    "trainer.max_skipped_updates", "trainer.cpus_per_worker", "trainer.gpus_per_worker", "rollout.cpus_per_worker",
    "rollout.gpus_per_worker", "rollout.request_timeout_s", "rollout.max_restarts",
)  # fmt: skip


@contextlib.contextmanager
def opened(config: ExperimentConfig, resume: str = "never") -> Iterator[ExperimentConfig]:
    """The settings under the name and folder of the run to make, which no other driver gets meanwhile.

    resume: `never` makes a new run beside earlier ones of its name; `auto` continues the last of its name where there
    is one; anything else is the folder of the run to continue. ValueError where that is no run, was made with other
    settings, or is being written by another process.
    """
    earlier = last_of_name(config) if resume == "auto" else None if resume == "never" else Path(resume)
    config = save(config) if earlier is None else continued(config, earlier)
    with (config.run_dir / CONFIG_FILE).open("r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{config.run_dir} is being written by another process; wait for it or stop it") from None
        if earlier is not None:
            write_whole(config.run_dir / CONFIG_FILE, dump(config))
        yield config


def last_of_name(config: ExperimentConfig) -> Path | None:
    """The folder of the newest run of this name (NAME, NAME-2, ...) that got as far as its settings."""
    made = [run.run_dir for run in numbered(config) if (run.run_dir / CONFIG_FILE).is_file()]
    return made[-1] if made else None


def continued(config: ExperimentConfig, run_dir: Path) -> ExperimentConfig:
    """`config` in the place of the run in `run_dir`. ValueError where settings that matter to a step differ."""
    file = run_dir / CONFIG_FILE
    if not file.is_file():
        raise ValueError(f"--resume {run_dir}: no {CONFIG_FILE} there; accepted: auto, never, or the folder of a run")
    here = config.model_copy(update={"name": run_dir.resolve().name, "output_dir": run_dir.parent})
    old, new = (dict(_leaves(settings.model_dump(mode="json"))) for settings in (load(file), here))
    wrong = [
        f"{key} was {old.get(key)!r} and is {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not key.startswith(MAY_DIFFER)
    ]
    if wrong:
        raise ValueError(
            f"{run_dir} was made with other settings: {'; '.join(wrong)}; continue it with its own {file}, or make a "
            "new run with --resume never"
        )
    return here


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every setting; lists count as one value."""
    if not isinstance(value, dict):
        yield prefix, value
        return
    for name, below in value.items():
        yield from _leaves(below, f"{prefix}.{name}" if prefix else name)
