"""Weights, moments and gradients of sharded parameters, gathered one at a time into Hugging Face tensors, and back.

What is written in this layout does not depend on how many ranks wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from miles_ext.errors import CheckpointError
from trainer.backends.megatron_names import Layout

KEPT = ("weights", "exp_avg", "exp_avg_sq")
HOST = "host.safetensors"


class Folder:
    """Tensors of all safetensors files of a folder by name, read when asked for."""

    def __init__(self, folder: Path) -> None:
        self.file_of: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as content:
                self.file_of |= dict.fromkeys(content.keys(), file)

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(self.file_of[name], framework="pt") as content:
            return content.get_tensor(name)


class State:
    """What this rank holds of a model. `gather` and `save` are collective over all ranks of a stage."""

    def __init__(self, model: nn.Module, optimizer: Any, layouts: dict[str, Layout], about: dict[str, Any]) -> None:
        """optimizer: megatron-core's. layouts: of every parameter. about: what a checkpoint must share with this model.

        Creates AdamW's state, so that there is something to load into.
        """
        self.parameters = dict(model.named_parameters())
        self.optimizer, self.layouts, self.about = optimizer, layouts, about
        self.tp_rank = parallel_state.get_tensor_model_parallel_rank()
        self.data_group = cast(dist.ProcessGroup, parallel_state.get_data_parallel_group())
        for parameter in self.parameters.values():
            if (part := self._part(parameter)) is not None:
                self.optimizer.optimizer.state[part[1]] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(part[1].detach()),
                    "exp_avg_sq": torch.zeros_like(part[1].detach()),
                }

    def load_weights(self, folder: Folder) -> None:
        for name in self.parameters:
            self._set(name, "weights", folder, prefix="")

    def gather(self, name: str, key: str) -> list[tuple[str, torch.Tensor]]:
        """(HF name, whole tensor) of a parameter on the ranks of data rank 0, nothing elsewhere.

        key: `parameter` as the model computes with it; `weights`, the optimizer's copy; `exp_avg`, `exp_avg_sq`,
        `grad` (after megatron-core prepared it).
        """
        parameter, layout = self.parameters[name], self.layouts[name]
        mine = parameter.detach() if key == "parameter" else self._over_data_ranks(parameter, key)
        if parallel_state.get_data_parallel_rank() != 0:
            return []
        shards = [mine]
        if layout.tp > 1 and layout.kind != "copied":
            shards = [torch.empty_like(mine) for _ in range(layout.tp)]
            dist.all_gather(shards, mine.contiguous(), group=tensor_group())
        return list(zip(layout.names, layout.whole(shards), strict=True))

    def names(self) -> Iterator[str]:
        """Parameters in order, without the copy that a last stage has of a tied table."""
        for name in self.parameters:
            if not (name == "output_layer.weight" and "lm_head.weight" not in self.layouts[name].names):
                yield name

    def save(self, folder: Path, updates: int) -> None:
        """One file a layer, written by the first rank of its stage, holding weights and moments."""
        for title, names in groupby(self.names(), lambda name: _title(self.layouts[name].names[0])):
            tensors = {}
            for name in names:
                for key in KEPT:
                    found = self.gather(name, key)
                    if self.tp_rank == 0:
                        tensors |= {f"{key}/{hf}": tensor.cpu().clone(memory_format=torch.contiguous_format)
                                    for hf, tensor in found}  # fmt: skip
            if tensors:
                save_file(tensors, folder / f"{title}.safetensors")
        if dist.get_rank() == 0:
            host = {"updates": torch.tensor(updates), "rng": torch.get_rng_state()}
            save_file(host, folder / HOST, metadata={"model": json.dumps(self.about)})

    def load(self, folder: Path) -> int:
        """Inverse of `save`, for any number of ranks; returns the updates done. CheckpointError for another model."""
        if not (folder / HOST).is_file():
            raise CheckpointError(f"{folder} was not saved by trainer.backend megatron: it has no {HOST}")
        with safe_open(folder / HOST, framework="pt") as content:
            about = json.loads(content.metadata()["model"])
        other = {key: (about.get(key), value) for key, value in self.about.items() if about.get(key) != value}
        if other:
            raise CheckpointError(f"{folder} does not fit the model being trained (saved, here): {other}")
        tensors = Folder(folder)
        for name in self.parameters:
            for key in KEPT:
                self._set(name, key, tensors, prefix=f"{key}/")
        updates = int(tensors["updates"])
        for state in self.optimizer.optimizer.state.values():
            state["step"].fill_(updates)
        torch.set_rng_state(tensors["rng"])
        return updates

    def _part(self, parameter: nn.Parameter) -> tuple[slice, torch.Tensor] | None:
        """Which elements of the flat parameter this rank's optimizer updates, and its own copy of them."""
        if not hasattr(self.optimizer, "model_param_group_index_map"):  # not the distributed optimizer
            return slice(0, parameter.numel()), parameter
        if parameter not in self.optimizer.model_param_group_index_map:
            return None
        group, place = self.optimizer.model_param_group_index_map[parameter]
        span = self.optimizer._get_model_param_range_map(parameter)["param"]
        return slice(span.start, span.end), self.optimizer.optimizer.param_groups[group]["params"][place]

    def _field(self, copy: torch.Tensor, key: str) -> torch.Tensor:
        if key == "weights":
            return copy.detach()
        if key == "grad":
            assert copy.grad is not None
            return copy.grad
        return self.optimizer.optimizer.state[copy][key]

    def _over_data_ranks(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        """A parameter-shaped tensor put together from what each data rank has of it."""
        part = self._part(parameter)
        if part is not None and part[0] == slice(0, parameter.numel()) and self.data_group.size() == 1:
            return self._field(part[1], key).view_as(parameter)
        high = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        flat = torch.zeros(parameter.numel(), dtype=high, device=parameter.device)
        whole = not hasattr(self.optimizer, "model_param_group_index_map")
        if part is not None and not (whole and self.data_group.rank()):
            flat[part[0]] = self._field(part[1], key).view(-1)
        dist.all_reduce(flat, group=self.data_group)  # every element is not zero on one rank only
        return flat.view_as(parameter)

    @torch.no_grad()
    def _set(self, name: str, key: str, tensors: Folder, prefix: str) -> None:
        parameter, layout = self.parameters[name], self.layouts[name]
        mine = layout.shard([tensors[prefix + hf] for hf in layout.names], self.tp_rank)
        if mine.shape != parameter.shape:
            raise CheckpointError(f"{layout.names} give {tuple(mine.shape)}, {name} is {tuple(parameter.shape)}")
        if key == "weights":
            parameter.copy_(mine)
        if (part := self._part(parameter)) is not None:
            field = self._field(part[1], key)
            field.copy_(mine.reshape(-1)[part[0]].view_as(field))


def tensor_group() -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, parallel_state.get_tensor_model_parallel_group())


def _title(name: str) -> str:
    """File of a tensor: model.layers.3.mlp.up_proj.weight is in layer-00003."""
    parts = name.split(".")
    return f"layer-{int(parts[2]):05d}" if parts[1] == "layers" else ".".join(parts[:-1])
