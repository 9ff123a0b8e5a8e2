"""The two ways of staged weights into a server's target."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from miles_ext.errors import RequestError, WeightError
from rollout.sglang_engine.client import Client
from rollout.sglang_engine.config import SglangConfig
from rollout.sglang_engine.staging import weight_files


def apply(client: Client, config: SglangConfig, folder: Path, version: int) -> None:
    """The weights of `folder` into the target of a paused server. Raises WeightError with the server's reason."""
    if config.transport == "disk":
        load_from_disk(client, folder, version)
    else:
        send_tensors(client, folder, version, config.tp_size)


def load_from_disk(client: Client, folder: Path, version: int) -> None:
    """The server reads the folder itself."""
    body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
    _post(client, "/update_weights_from_disk", body)


def send_tensors(client: Client, folder: Path, version: int, tp_size: int) -> None:
    """Every file as one message that holds its tensors by value: the server need not see the folder."""
    _post(client, "/begin_weight_update", {"selector": "target"})
    try:
        files = weight_files(folder)
        for file in files:
            # Not torch's own pickler: that passes handles of shared memory, which only a child process can open.
            message = base64.b64encode(pickle.dumps(list(load_file(file).items()))).decode("ascii")
            body: dict[str, Any] = {
                "serialized_named_tensors": [message] * tp_size, "selector": "target",
                "flush_cache": file == files[-1],
            }  # fmt: skip
            if file == files[-1]:
                body["weight_version"] = str(version)
            _post(client, "/update_weights_from_tensor", body)
    finally:
        _post(client, "/end_weight_update", {})


def _post(client: Client, path: str, body: dict[str, Any]) -> None:
    try:
        answer = client.post(path, body)
    except RequestError as error:  # HTTP 400 is how sglang says that an update failed
        raise WeightError(str(error)) from error
    if not answer["success"]:
        raise WeightError(f"{client.url}{path}: {answer['message']}")
