"""What a run leaves on disk beside its rollouts: the facts of its start and handoffs, manifests, a bundle."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from miles_ext.capability import EngineCapability
from miles_ext.weights import HandoffReport, WeightManifest, combine

START_FILE = "start.json"
HANDOFF_FILE = "handoffs.jsonl"
RESUME_FILE = "resumes.jsonl"
MANIFEST_FILE = "manifest.json"
AUDIT_FILE = "audit.json"


def record_start(
    arm_dir: Path, initial: WeightManifest, capabilities: Sequence[EngineCapability], trained_digest: str = ""
) -> None:
    """Write start.json: digests of the weights before any update, as sent and as trained, the transform declared, and
    what every engine rank said of itself. trained_digest: empty where they are sent in the dtype they are trained in.
    """
    arm_dir.mkdir(parents=True, exist_ok=True)
    reports = [dataclasses.asdict(capability) for capability in capabilities]
    start = {
        "weight_version": initial.version, "weights_digest": initial.digest,
        "trained_digest": trained_digest or combine(initial.tensors),
        "transform": dict(initial.transform), "capabilities": reports,
    }  # fmt: skip
    write_whole(arm_dir / START_FILE, json.dumps(start, indent=1, default=sorted) + "\n")


def record_handoff(
    arm_dir: Path, step: int, manifest: WeightManifest, reports: Iterable[HandoffReport], file: str = HANDOFF_FILE
) -> None:
    """Append one line to handoffs.jsonl: the digest the trainer sent, and what every engine proved of it.

    file: resumes.jsonl for the weights of a checkpoint, which the engines of a continued run get once more.
    """
    line = {
        "step": step, "version": manifest.version, "sent_digest": manifest.digest,
        "transform": dict(manifest.transform),
        "reports": [dataclasses.asdict(report) for report in reports],
    }  # fmt: skip
    with (arm_dir / file).open("a") as opened:
        opened.write(json.dumps(line) + "\n")


def read_handoffs(arm_dir: Path, file: str = HANDOFF_FILE) -> list[dict[str, Any]]:
    """Lines of handoffs.jsonl (or of resumes.jsonl) in order of version; the last of a version counts."""
    found = arm_dir / file
    lines = found.read_text().splitlines(keepends=True) if found.exists() else []
    lines = [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be cut short by a crash
    return [line for _, line in sorted({line["version"]: line for line in lines}.items())]


def write_manifest(arm_dir: Path, failure: str = "") -> str:
    """Write manifest.json over every file of the arm and return its digest; call it for failed runs too.

    failure: why the arm ended early, empty when it finished.
    """
    files = {
        name: {"sha256": sha256(arm_dir / name), "bytes": (arm_dir / name).stat().st_size} for name in _names(arm_dir)
    }
    text = json.dumps({"failure": failure, "files": files}, indent=1, sort_keys=True) + "\n"
    write_whole(arm_dir / MANIFEST_FILE, text)
    return hashlib.sha256(text.encode()).hexdigest()


def verify_manifest(arm_dir: Path) -> dict[str, Any]:
    """Return the manifest; ValueError listing every file that is missing, changed or unlisted.

    Of W&B's own files only a missing one counts.
    """
    file = arm_dir / MANIFEST_FILE
    if not file.exists():
        raise ValueError(f"{file} does not exist: the run was killed before it could write one, or the path is wrong")
    manifest = json.loads(file.read_text())
    listed, found = manifest["files"], set(_names(arm_dir))
    missing = sorted(listed.keys() - found)
    # W&B goes on in its own folder: its process may flush after a run is closed, and `wandb sync` leaves marks there.
    ours = {name for name in found if not name.startswith("wandb/")}
    unlisted = sorted(ours - listed.keys())
    changed = sorted(name for name in listed.keys() & ours if sha256(arm_dir / name) != listed[name]["sha256"])
    if missing or unlisted or changed:
        raise ValueError(
            f"{arm_dir} differs from its manifest: missing {missing}, unlisted {unlisted}, changed {changed}"
        )
    return manifest


def arm_dirs(run_dir: Path) -> list[Path]:
    """Folders of the arms of an experiment, in the order of its config and of seeds. ValueError where there is none."""
    marks = (MANIFEST_FILE, START_FILE, "metrics.jsonl")
    found = {file.parent for mark in marks for file in run_dir.glob(f"*/{mark}")}
    if not found:
        raise ValueError(f"{run_dir} holds no arm; accepted: runs/<experiment> with <arm>-s<seed> folders in it")
    config = run_dir / "config.yaml"
    names = [arm["name"] for arm in yaml.safe_load(config.read_text())["arms"]] if config.exists() else []

    def place(arm_dir: Path) -> tuple[int, str, int]:
        arm, seed = arm_and_seed(arm_dir)
        return (names.index(arm) if arm in names else len(names)), arm, seed

    return sorted(found, key=place)


def arm_and_seed(arm_dir: Path) -> tuple[str, int]:
    """`dflash2-s3` -> ("dflash2", 3)."""
    arm, mark, seed = arm_dir.name.rpartition("-s")
    if not mark or not seed.isdigit():
        raise ValueError(f"arm folder is named {arm_dir.name!r}; accepted: <arm>-s<seed>")
    return arm, int(seed)


def bundle(run_dir: Path, archive: Path | None = None) -> tuple[Path, str]:
    """Pack an experiment, every arm's manifest verified first; return the archive and its SHA-256.

    The same files give the same bytes: names sorted, no times, owners or modes. Default: <run_dir>.tar beside it.
    """
    for arm in arm_dirs(run_dir):
        verify_manifest(arm)
    archive = archive or run_dir.with_name(run_dir.name + ".tar")
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        for name in _files(run_dir):
            info = tarfile.TarInfo(f"{run_dir.name}/{name}")
            info.size = (run_dir / name).stat().st_size
            with (run_dir / name).open("rb") as file:
                tar.addfile(info, file)
    return archive, sha256(archive)


def write_whole(file: Path, text: str) -> None:
    """Write a text file so that a crash leaves the old content or the new, never a part."""
    part = file.with_name(f"{file.name}.part")
    with part.open("w") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    part.replace(file)


def sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _names(arm_dir: Path) -> list[str]:
    """Files a manifest covers: all but itself and the audit, which is made of it afterwards."""
    return [name for name in _files(arm_dir) if name not in (MANIFEST_FILE, AUDIT_FILE)]


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in _walk(folder))


def _walk(folder: Path) -> Iterator[Path]:
    """Regular files; no links, and none of W&B's debug logs, which its service still writes after a run's end."""
    for path in folder.rglob("*"):
        wandb_log = path.name.startswith("debug") and path.suffix == ".log" and "wandb" in path.parts
        if path.is_file() and not path.is_symlink() and not wandb_log:
            yield path
