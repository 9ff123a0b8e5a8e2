"""What every route shares: the engine's thread, the model, the metrics, and the one way through the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_ext.errors import RequestError
from rollout.engine import Request
from rollout.server.batching import EngineThread
from rollout.server.meta import finish, meta_info, require_recorded
from rollout.server.metrics import Metrics
from rollout.server.model import Model
from rollout.server.params import Wants


@dataclass(frozen=True)
class Answer:
    prompt_ids: list[int]
    ids: list[int]
    text: str
    meta: dict[str, Any]


@dataclass(frozen=True)
class Front:
    engine: EngineThread
    model: Model
    metrics: Metrics

    async def answer(self, requests: Sequence[Request], wants: Wants) -> list[Answer]:
        """Answers in the order of `requests`, all or none. Raises RequestError, ContentError, EngineError."""
        if not requests:
            raise RequestError("the batch is empty; accepted: at least one prompt")
        start = time.perf_counter()
        completions = await self.engine.generate(requests)
        latency_s = time.perf_counter() - start
        answers = []
        for request, completion in zip(requests, completions, strict=True):
            self.metrics.count(completion, latency_s)
            require_recorded(request, completion)
            reason, text = finish(self.model, request, completion)
            meta = meta_info(self.model, request, completion, wants, reason, latency_s)
            answers.append(Answer(completion.prompt_ids.tolist(), completion.response_ids.tolist(), text, meta))
        return answers


def prompts(model: Model, value: Any, where: str) -> tuple[list[NDArray[np.int32]], bool]:
    """(prompts as ids, whether they are a batch) of a text, a list of texts, ids, or a list of ids."""
    many = isinstance(value, list) and bool(value) and not isinstance(value[0], int)
    found = []
    for one in value if many else [value]:
        if isinstance(one, str):
            found.append(model.encode(one))
        elif isinstance(one, list) and one and all(type(i) is int and 0 <= i < model.vocab_size for i in one):
            found.append(np.array(one, np.int32))
        else:
            raise RequestError(
                f"{where}: a prompt is neither text nor a list of ids in [0, {model.vocab_size}) with one id or more"
            )
    return found, many
