"""The embedded engine behind HTTP with the weight endpoints of sglang, as its plugin answers them, and their faults."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from fastapi import Body, Response
from fastapi.responses import JSONResponse
from safetensors.torch import load_file

from miles_ext.capability import ArmKind, EngineCapability
from miles_ext.tensors import digest
from rollout.embedded.engine import EmbeddedEngine
from rollout.server.app import make_app
from rollout.server.model import Model
from rollout.server.running import running
from tests.rollout.served import TINY

Fault = Literal["", "refused", "other bytes", "draft bit", "dead", "for good"]


class Updatable(EmbeddedEngine):
    """Reports a received digest, as the plugin does."""

    received = ""
    verifier_impl: Literal["production", "test"] = "production"

    def capability(self) -> list[EngineCapability]:
        return [
            replace(one, verifier_impl=self.verifier_impl, extra={**one.extra, "received_digest": self.received})
            for one in super().capability()
        ]


@dataclass
class Server:
    engine: Updatable
    url: str = ""
    fault: Fault = ""
    """What goes wrong at the next update; `for good` at every one."""
    calls: list[str] = field(default_factory=list)
    pieces: dict[str, torch.Tensor] = field(default_factory=dict)

    def load(self, tensors: dict[str, torch.Tensor], version: str) -> JSONResponse:
        fault, self.fault = self.fault, "for good" if self.fault == "for good" else ""
        if fault == "refused":
            return JSONResponse({"success": False, "message": "no such file"}, 400)
        if fault == "dead":
            return JSONResponse({"error": {"message": "scheduler died"}}, 500)
        if fault in ("other bytes", "for good"):
            tensors = tensors | {"model.norm.weight": tensors["model.norm.weight"] + 1}
        if fault == "draft bit":
            assert self.engine.draft is not None
            next(iter(dict(self.engine.draft.private_tensors()).values())).view(torch.int32).flatten()[0] ^= 1
        self.engine.target.load_hf_tensors(tensors)
        self.engine.received, self.engine.weight_version = digest(tensors), int(version)
        return JSONResponse({"success": True, "message": ""})


@contextmanager
def updatable(arm: ArmKind = "dflash2") -> Iterator[Server]:
    engine = Updatable(TINY / "target", TINY / "draft", arm, device="cpu", max_concurrency=8, threads=1)
    model = Model(TINY / "target", vocab_size=engine.vocab_size, context_length=engine.context_length, name="tiny")
    app, server = make_app(engine, model), Server(engine)

    @app.post("/{action}_generation")
    def pause_or_continue(action: str, body: dict[str, Any] = Body()) -> Response:  # noqa: B008
        server.calls.append(action)
        return JSONResponse({"status": "ok"})

    @app.post("/update_weights_from_disk")
    def disk(body: dict[str, Any] = Body()) -> Response:  # noqa: B008
        server.calls.append(f"disk {body['weight_version']}")
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        return server.load({n: t for file in files for n, t in load_file(file).items()}, body["weight_version"])

    @app.post("/{action}_weight_update")
    def bracket(action: str, body: dict[str, Any] = Body()) -> Response:  # noqa: B008
        server.calls.append(action)
        assert body == ({"selector": "target"} if action == "begin" else {})
        return JSONResponse({"success": True, "message": ""})

    @app.post("/update_weights_from_tensor")
    def tensor(body: dict[str, Any] = Body()) -> Response:  # noqa: B008
        server.calls.append("tensor")
        assert body["selector"] == "target"
        (message,) = body["serialized_named_tensors"]
        server.pieces |= dict(pickle.loads(base64.b64decode(message)))
        if "weight_version" not in body:
            return JSONResponse({"success": True, "message": ""})
        whole, server.pieces = server.pieces, {}
        return server.load(whole, body["weight_version"])

    with running(app) as server.url:
        yield server
