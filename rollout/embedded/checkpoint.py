"""Reads and writes model folders in the Hugging Face layout: config.json beside safetensors weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file


def read_config(folder: str | Path) -> dict[str, Any]:
    """The parsed config.json of `folder`; ValueError when the folder holds none."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; a model folder holds config.json beside its safetensors weights")
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); restore the file") from error


def read_tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    """Every tensor of model.safetensors, or of the shards that model.safetensors.index.json names, on the CPU."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        if not (folder / file).is_file():
            raise ValueError(f"{folder / file} does not exist; weights are read from safetensors files only")
        try:
            tensors.update(load_file(folder / file))
        except SafetensorError as error:
            raise ValueError(f"{folder / file} is no safetensors file ({error}); restore the file") from error
    return tensors


def write_model(folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write config.json and model.safetensors. Tensors are stored in the dtype and the order they come in."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
    stored = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def check_tensors(
    tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], what: str, partial: bool = False
) -> None:
    """ValueError unless `tensors` has the names and shapes of `expected` (some of them, when `partial`)."""
    missing = [] if partial else sorted(set(expected) - set(tensors))
    unknown = sorted(set(tensors) - set(expected))
    if missing or unknown:
        raise ValueError(
            f"{what} does not fit the architecture in its config.json: missing {missing[:8]} ({len(missing)} in all), "
            f"unknown {unknown[:8]} ({len(unknown)} in all)"
        )
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"{what}: {name} has shape {tuple(tensor.shape)}, config.json asks for {tuple(expected[name].shape)}"
            )
