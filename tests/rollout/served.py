"""The shipped tiny models behind HTTP, for the tests of the server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from experiments.tasks import addition
from miles_ext.capability import ArmKind
from miles_ext.sampling import SamplingSpec
from rollout.embedded.engine import EmbeddedEngine
from rollout.engine import Request
from rollout.server.app import make_app
from rollout.server.model import Model
from rollout.server.running import running

ROOT = Path(__file__).parents[2]
TINY = ROOT / "experiments" / "models" / "tiny"
PROMPT = "123+456="
PROMPT_IDS = np.array(addition.encode(PROMPT), np.int32)


@dataclass(frozen=True)
class Served:
    engine: EmbeddedEngine
    model: Model
    client: httpx.Client

    def post(self, path: str, body: dict[str, Any], status: int = 200) -> Any:
        answer = self.client.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def refusal(self, path: str, body: dict[str, Any], status: int = 400) -> str:
        return self.post(path, body, status)["error"]["message"]


@contextmanager
def serving(arm: ArmKind = "dflash2", health_timeout_s: float = 20.0) -> Iterator[Served]:
    engine = load(arm)
    model = Model(TINY / "target", vocab_size=engine.vocab_size, context_length=engine.context_length, name="tiny")
    app = make_app(engine, model, health_timeout_s=health_timeout_s)
    with running(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield Served(engine, model, client)


def load(arm: ArmKind = "dflash2") -> EmbeddedEngine:
    return EmbeddedEngine(TINY / "target", TINY / "draft", arm, device="cpu", max_concurrency=8, threads=1)


def request(
    seed: int = 0, *, prompt: str = PROMPT, stop: tuple[str, ...] = (), max_new_tokens: int = 60, **spec: Any
) -> Request:
    return Request(
        request_id=f"test-{seed}",
        prompt_ids=np.array(addition.encode(prompt), np.int32),
        spec=SamplingSpec(seed=seed, **spec),
        max_new_tokens=max_new_tokens,
        stop_ids=(addition.EOS_ID,),
        stop_strings=stop,
    )


def sc(capture: str = "head", k: int = 32, seed: int = 0, **changes: Any) -> dict[str, Any]:
    return {"sc": {"v": 1, "capture": capture, "k": k, "order": "top_k_first", "seed": seed, **changes}}
