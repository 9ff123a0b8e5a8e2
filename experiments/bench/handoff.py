"""`bench handoff`: trainer to engine through Ray's object store, over the floor of moving the same bytes.

Path: export (cast copy and digests), put, get, and the engine's update (received digest, draft digest, all-or-nothing
application, resident digest). Floor: what cannot be left out, on whole buckets: the copy that lets training go on, put
and get, the copy into place, and a digest of what is sent, received and resident. The path also keeps the old weights
until the new ones are verified. All in one process and one thread, taken in turns, on processor seconds, which other
load on the machine does not stretch.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from experiments import cluster
from experiments.evidence import at_most, report
from miles_ext.weights import tensor_digest
from rollout.embedded.engine import EmbeddedEngine
from trainer.backends.torch import TorchBackend
from trainer.config import TrainerConfig
from trainer.handoff import Bucket, export

BUCKET_MB = 64.0


def rows(quick: bool = False) -> list[dict[str, Any]]:
    """Measure; `quick` takes a smaller model and fewer rounds."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, cluster.session(1):
        target = make_target(Path(folder), layers=2 if quick else 12)
        backend = TorchBackend(TrainerConfig(device="cpu"), target)
        engine = EmbeddedEngine(target, None, "regular", device="cpu", max_concurrency=1, context_length=16)
        version = 0

        def path() -> None:
            nonlocal version
            version += 1
            manifest, buckets = export(backend, version, "float32", BUCKET_MB)
            shared = [ray.put(bucket) for bucket in buckets]
            done = engine.update_weights(manifest, (ray.get(ref) for ref in shared))
            assert done.received_digest == manifest.digest

        _, ready = export(backend, 0, "float32", BUCKET_MB)
        size = sum(array.nbytes for bucket in ready for array in bucket.values())

        resident = [{name: np.copy(array) for name, array in bucket.items()} for bucket in ready]

        def floor() -> None:
            sent = [{name: np.copy(array) for name, array in bucket.items()} for bucket in ready]
            digests = [tensor_digest(array) for bucket in sent for array in bucket.values()]
            shared = [ray.put(bucket) for bucket in sent]
            received = [ray.get(ref) for ref in shared]
            assert digests == [tensor_digest(array) for bucket in received for array in bucket.values()]
            copy(resident, received)
            assert digests == [tensor_digest(array) for bucket in resident for array in bucket.values()]

        def move() -> None:
            shared = [ray.put(bucket) for bucket in ready]
            copy(resident, [ray.get(ref) for ref in shared])

        jobs = {"path": path, "floor": floor, "move": move, "copy": lambda: copy(resident, ready)}
        times = interleaved(jobs, rounds=5 if quick else 15)
    seconds = {name: statistics.median(found) for name, found in times.items()}

    def over(job: str) -> tuple[float, str]:
        ratios = [a / b for a, b in zip(times["path"], times[job], strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} rounds, {size / 2**20:.0f} MiB float32"
        return statistics.median(ratios), f"{spread}; {seconds['path']:.3f} over {seconds[job]:.3f} CPU s"

    over_floor, of_floor = over("floor")
    found = [
        at_most("handoff/over_floor", over_floor, 1.25, "x", of_floor),
        report("handoff/over_transport", over("move")[0], "x", f"put, get and one copy; {over('move')[1]}"),
        report("handoff/over_copy", over("copy")[0], "x", f"one plain memory copy; {over('copy')[1]}"),
        report("handoff/seconds", seconds["path"], "CPU s", f"{size / 2**30 / seconds['path']:.2f} GiB/s"),
        report("handoff/floor_seconds", seconds["floor"], "CPU s", f"{size / 2**30 / seconds['floor']:.2f} GiB/s"),
    ]
    return [row.as_json() for row in found]


def copy(into: list[Bucket], source: list[Bucket]) -> None:
    for target, bucket in zip(into, source, strict=True):
        for name, array in bucket.items():
            np.copyto(target[name], array)


def make_target(folder: Path, layers: int) -> Path:
    config = Qwen3Config(
        vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def interleaved(jobs: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each job in each round; one round to warm up is not counted."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(rounds + 1):
        for name, job in jobs.items():
            start = time.process_time()
            job()
            if turn:
                times[name].append(time.process_time() - start)
    return times
