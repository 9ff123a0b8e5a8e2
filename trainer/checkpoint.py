"""Checkpoints that are whole or absent: written aside, synced, renamed, and only then pointed at."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
import xxhash

from miles_ext.errors import CheckpointError
from trainer.backends.base import Backend

CONTENTS = "contents.json"
LATEST = "latest"


def save(backend: Backend, folder: Path, version: int, beside: Path | None = None) -> None:
    """Write weights, optimizer, update count, random state and `version` to `folder`; point `latest` beside it there.

    beside: a folder whose files move into the checkpoint and are vouched for with the rest. Collective; all ranks must
    see the same file system. A folder of that name is replaced.
    """
    aside = folder.with_name(f"{folder.name}.partial")
    if backend.rank == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    _barrier(backend)
    backend.save(aside)
    _barrier(backend)
    if backend.rank == 0:
        for file in sorted(beside.iterdir()) if beside else ():
            file.replace(aside / file.name)
        files = {file.name: _digest(file) for file in sorted(aside.iterdir())}
        _write(aside / CONTENTS, json.dumps({"version": version, "updates": backend.updates, "files": files}, indent=1))
        for file in (*aside.iterdir(), aside):
            _sync(file)
        _replace(aside, folder)
        _write(folder.with_name(f"{LATEST}.partial"), folder.name + "\n")
        os.replace(folder.with_name(f"{LATEST}.partial"), folder.with_name(LATEST))
        _sync(folder.parent)
    _barrier(backend)


def load(backend: Backend, folder: Path) -> int:
    """Restore what `save` wrote and return its version. CheckpointError where it is incomplete or does not fit."""
    contents = verify(folder)
    backend.load(folder)
    return contents["version"]


def latest(root: Path) -> Path | None:
    """The folder that `latest` under `root` points at; None where nothing was saved yet."""
    pointer = root / LATEST
    return root / pointer.read_text().strip() if pointer.is_file() else None


def saved(root: Path) -> list[Path]:
    """Every checkpoint under `root` by falling name, the one that `latest` points at first."""
    found = sorted((file.parent for file in root.glob(f"*/{CONTENTS}") if not file.parent.suffix), reverse=True)
    newest = latest(root)
    return sorted(found, key=lambda folder: folder != newest)


def prune(root: Path, keep: int) -> None:
    """Remove all but `keep` checkpoints, and what interrupted saves left behind."""
    for folder in (*saved(root)[keep:], *root.glob("*.partial"), *root.glob("*.old")):
        shutil.rmtree(folder) if folder.is_dir() else folder.unlink()


def verify(folder: Path) -> dict:
    """The table of contents; CheckpointError naming each file that is missing, differs from it or is not in it."""
    if not (folder / CONTENTS).is_file():
        raise CheckpointError(f"{folder} is no complete checkpoint: it has no {CONTENTS}; use an earlier one")
    try:
        contents = json.loads((folder / CONTENTS).read_text())
        names = contents["files"].keys()
        _ = contents["version"], contents["updates"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{folder / CONTENTS} is no table of contents; use an earlier checkpoint") from error
    extra = {file.name for file in folder.iterdir()} - names - {CONTENTS}
    if extra:
        raise CheckpointError(f"{folder} holds {sorted(extra)}, which its {CONTENTS} does not list; remove them")
    wrong = [
        name for name, digest in contents["files"].items()
        if not (folder / name).is_file() or _digest(folder / name) != digest
    ]  # fmt: skip
    if wrong:
        raise CheckpointError(f"{folder} is damaged: {wrong} are missing or changed; use an earlier checkpoint")
    return contents


def _replace(aside: Path, folder: Path) -> None:
    old = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _digest(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as content:
        while block := content.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _write(file: Path, text: str) -> None:
    file.write_text(text)
    _sync(file)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _barrier(backend: Backend) -> None:
    backend.sum_over_ranks(torch.zeros(1))
