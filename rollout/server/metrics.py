"""Prometheus metrics under sglang's names where sglang has one, so that its dashboards read this server too."""

from __future__ import annotations

from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from miles_ext.records import Completion, Status


class Metrics:
    """One registry a server: several servers may live in one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, what: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, what, labels, registry=registry)

        self._requests = counter("sglang:num_requests", "Prompts answered.")
        self._prompt_tokens = counter("sglang:prompt_tokens", "Prompt tokens prefilled.")
        self._tokens = counter("sglang:generation_tokens", "Tokens committed.")
        self._steps = counter("sc:decode_steps", "Decoding steps, summed over the responses that took part.")
        self._proposed = counter("sc:proposed_drafts", "Draft tokens proposed.")
        self._accepted = counter("sc:accepted_drafts", "Draft tokens accepted.")
        self._rows = counter("sc:support_rows", "Support rows recorded, by status.", ("status",))
        self._responses = counter("sglang:http_responses", "HTTP responses.", ("endpoint", "status_code"))
        self._latency = Histogram(
            "sglang:e2e_request_latency_seconds", "From the queue to the finished response.", registry=registry
        )
        for status in Status:
            self._rows.labels(status.name.lower())

    def watch(self, engine: Any) -> None:
        """Report an EngineThread's load when scraped."""
        for name, what, read in (
            ("sglang:num_running_reqs", "Prompts in the engine.", lambda: engine.running),
            ("sglang:num_queue_reqs", "Prompts that wait for the engine.", lambda: engine.queued),
            ("sc:engine_calls", "Batches that the engine returned from.", lambda: engine.calls),
        ):
            Gauge(name, what, registry=self.registry).set_function(read)

    def count(self, completion: Completion, latency_s: float) -> None:
        self._requests.inc()
        self._prompt_tokens.inc(len(completion.prompt_ids))
        self._tokens.inc(len(completion))
        self._steps.inc(completion.spec.live_steps)
        self._proposed.inc(completion.spec.proposed)
        self._accepted.inc(completion.spec.accepted)
        self._latency.observe(latency_s)
        if completion.support is not None:
            for status, rows in zip(Status, np.bincount(completion.support.status, minlength=3), strict=True):
                self._rows.labels(status.name.lower()).inc(int(rows))

    def count_http(self, endpoint: str, status_code: int) -> None:
        self._responses.labels(endpoint, str(status_code)).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)
