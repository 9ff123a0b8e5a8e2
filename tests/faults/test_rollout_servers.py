"""Servers that die under their clients, and come back."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from miles_ext.errors import EngineError
from miles_ext.sampling import SamplingSpec
from rollout.config import RolloutConfig
from rollout.pool import RolloutPool
from rollout.server.running import bind
from rollout.sglang_engine.client import Client
from tests.rollout.served import PROMPT, ROOT, TINY, request, sc
from tests.rollout.updatable import updatable

pytestmark = pytest.mark.faults
SERVE = [sys.executable, "-m", "rollout.server", "--target", str(TINY / "target"), "--threads", "1", "--port"]


def test_a_server_killed_while_requests_are_queued_answers_each_once_or_not_at_all() -> None:
    """Sixteen clients, four at a time in the engine: whoever gets no answer gets a named error, and nobody waits."""
    command = [*SERVE, "0", "--max-concurrency", "4"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        port = int(url.rsplit(":", 1)[1])
        answered: list[str] = []

        def ask(name: str) -> str:
            body = {"text": PROMPT, "rid": name, "sampling_params": {"custom_params": sc(), "max_new_tokens": 200}}
            for _ in range(1000):
                (answer,) = Client(url, 60.0, 1).generate([body])
                answered.append(answer["meta_info"]["id"])
                if len(answered) == 8:
                    server.kill()
            return name

        with ThreadPoolExecutor(16) as clients:
            asked = [clients.submit(ask, f"client {i}") for i in range(16)]
            errors = [one.exception(timeout=120) for one in asked]
    assert all(isinstance(error, EngineError) and "does not answer" in str(error) for error in errors)
    assert len(answered) >= 8 and set(answered) <= {f"client {i}" for i in range(16)}
    assert server.returncode == -signal.SIGKILL
    bind("127.0.0.1", port).close()


@pytest.mark.ray
def test_an_attached_server_that_went_away_is_named_and_leaves_nothing(ray_cluster: None, tmp_path: Path) -> None:
    with updatable() as server:
        config = RolloutConfig.model_validate(
            {
                "engine": "sglang", "cpus_per_worker": 0.25, "max_concurrency": 4, "max_restarts": 1,
                "restart_backoff_s": 0.1, "sglang": {"urls": [server.url], "folder": tmp_path},
            }
        )  # fmt: skip
        pool = RolloutPool(config, "dflash2", TINY / "target", TINY / "draft", SamplingSpec())
        pool.start()
        assert len(pool.generate([request(i) for i in range(3)])) == 3
    try:
        with pytest.raises(EngineError, match="failed 2 times in a row.*does not answer.*unanswered: 3 of 3"):
            pool.generate([request(i) for i in range(3)])
    finally:
        pool.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url)
