"""What the probe inside a server wrote (`miles_ext.sglang_plugin.probe`), request by request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from experiments.validate.engines import Watched
from miles_ext.records import Commit, Completion
from miles_ext.sglang_plugin.probe import WATCH
from rollout.engine import Request
from rollout.sglang_engine.engine import SglangEngine

Step = tuple[str, list[str], dict[str, NDArray[Any]]]  # kind, request ids of its rows, tensors


class ServerWatch:
    """Follows request ids, which must differ within one block. folder: the server's MILES_SC_PROBE."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lengths: dict[str, int] = {}
        self.steps: list[Step] | None = None

    @contextmanager
    def installed(self, engine: SglangEngine) -> Iterator[None]:
        if not self.folder.is_dir():
            raise RuntimeError(f"no probe writes to {self.folder}: the server was started without MILES_SC_PROBE")
        for path in self.folder.glob("step-*"):
            path.unlink()
        generate = engine.generate

        def counted(requests: Sequence[Request]) -> list[Completion]:
            completions = generate(requests)
            self.lengths |= {r.request_id: len(c) for r, c in zip(requests, completions, strict=True)}
            return completions

        (self.folder / WATCH).touch()
        try:
            with patch.object(engine, "generate", counted):
                yield
        finally:
            (self.folder / WATCH).unlink()

    def of(self, request: Request) -> Watched:
        """Every step of the request until it had all of its tokens: with overlapped scheduling one more may follow."""
        if self.steps is None:
            self.steps = [read(path) for path in sorted(self.folder.glob("step-*.safetensors"))]
        watched = Watched([], [], [], [])
        for kind, names, tensors in self.steps:
            if len(watched.tokens) >= self.lengths[request.request_id]:
                break
            mine = [i for i, name in enumerate(names) if name.partition("~")[0] == request.request_id]
            for row in mine:
                add(watched, kind, row, tensors)
        return watched


def read(path: Path) -> Step:
    with safe_open(path, "np") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  safe_open is no mapping
    return metadata["kind"], json.loads(metadata["rids"]), tensors


def add(watched: Watched, kind: str, row: int, step: dict[str, NDArray[Any]]) -> None:
    """One row of one step, with the commit kinds that the kernel's own count gives."""
    if kind != "verify":
        watched.tokens.append(int(step["tokens"][row]))
        watched.laws.append(step["probs"][row].astype(np.float32))
        watched.logits.append(step["logits"][row].astype(np.float32))
        watched.kinds.append(int(Commit.PREFILL if kind == "prefill" else Commit.PLAIN))
        return
    block, accepted = step["candidates"].shape[1], int(step["accepted"][row])
    watched.tokens += [*step["candidates"][row, 1 : accepted + 1].tolist(), int(step["bonus"][row])]
    watched.laws += list(step["probs"][row, : accepted + 1].astype(np.float32))
    watched.logits += list(step["logits"][row * block : row * block + accepted + 1].astype(np.float32))
    last = Commit.FULL_BONUS if accepted + 1 == block else Commit.REJECT_BONUS
    watched.kinds += [int(Commit.DRAFT)] * accepted + [int(last)]
