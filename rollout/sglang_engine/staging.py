"""Handed-over weights on disk: one file a bucket as it arrives, verified before a server hears of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from miles_ext.errors import WeightError
from miles_ext.tensors import entry, from_array
from miles_ext.weights import TensorEntry, WeightManifest
from rollout.engine import Bucket

BESIDE = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def stage(manifest: WeightManifest, buckets: Iterable[Bucket], target: Path, folder: Path) -> None:
    """Fill `folder` with safetensors files that hold exactly what `manifest` lists, beside the target's settings.

    target: the checkpoint that the server was started with. Raises WeightError where names or shapes are not the
    target's, or a tensor is missing, comes twice, or differs from its digest; `folder` is removed then.
    """
    require_fit(manifest, target)
    folder.mkdir(parents=True)
    try:
        received: dict[str, TensorEntry] = {}
        for number, bucket in enumerate(buckets):
            unknown = sorted(bucket.keys() - manifest.tensors.keys())
            twice = sorted(bucket.keys() & received.keys())
            if unknown or twice:
                raise WeightError(
                    f"version {manifest.version}: {unknown} are not in its manifest and {twice} arrived twice; nothing "
                    "was applied, send every listed tensor once"
                )
            tensors = {name: from_array(array, manifest.tensors[name].dtype) for name, array in bucket.items()}
            received |= {name: entry(tensor) for name, tensor in tensors.items()}
            save_file(tensors, folder / f"model-{number:05d}.safetensors", metadata={"format": "pt"})
        manifest.require_received(received)
        for name in BESIDE:
            if (target / name).is_file():
                shutil.copy(target / name, folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def require_fit(manifest: WeightManifest, target: Path) -> None:
    """Raise WeightError unless the manifest has the names and shapes of the target's checkpoint.

    sglang passes over tensors that are missing, and does not survive one of another shape.
    """
    if manifest.transform:
        raise WeightError(
            f"manifest declares the transform {dict(manifest.transform)}; this engine applies none: send plain weights"
        )
    expected = shapes(target)
    offered = {name: tensor.shape for name, tensor in manifest.tensors.items()}
    wrong = sorted(name for name in expected.keys() | offered.keys() if expected.get(name) != offered.get(name))
    if wrong:
        name = wrong[0]
        raise WeightError(
            f"version {manifest.version} does not fit {target}: {len(wrong)} tensors differ (first {name}: "
            f"{offered.get(name, 'missing')}, the target has {expected.get(name, 'none of that name')}); "
            "export the same architecture, tied heads once"
        )


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a checkpoint by name, from the headers of its files."""
    found: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  safe_open is no mapping
                found[name] = tuple(opened.get_slice(name).get_shape())
    return found


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))
