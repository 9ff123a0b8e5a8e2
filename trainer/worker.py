"""The trainer as Ray actors, one a rank, in one placement group."""

from __future__ import annotations

import math
import resource
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles_ext.errors import TrainerLostError
from miles_ext.records import Trajectory
from miles_ext.weights import WeightManifest
from trainer import checkpoint
from trainer.backends.base import Backend
from trainer.backends.megatron_config import check
from trainer.backends.torch import TorchBackend, pick_device
from trainer.config import TrainerConfig
from trainer.handoff import Bucket, export
from trainer.step import train_step

RESUME = "run with --resume auto goes on from the last checkpoint"


class TrainerWorker:
    """One rank. Every method is collective: all ranks make the same calls in the same order."""

    def __init__(
        self, config: TrainerConfig, target: Path, seed: int, rank: int = 0, world_size: int = 1,
        master_addr: str = "127.0.0.1", master_port: int = 0,
    ) -> None:  # fmt: skip
        torch.set_num_threads(config.threads)
        torch.manual_seed(seed)
        if world_size > 1:
            device = pick_device(config.device)
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                init_method=f"tcp://{master_addr}:{master_port}", rank=rank, world_size=world_size,
            )  # fmt: skip
        self.config = config
        self.version = 0
        self.backend = _backend(config, target, rank, world_size)

    def train(
        self, trajectories: Sequence[Trajectory], *, temperature: float, step: int = 0, probe: Path | None = None,
        skips: int = 0,
    ) -> dict[str, float]:  # fmt: skip
        """See trainer.step.train_step; adds perf/train_rss_mb, the largest resident size of any rank so far."""
        metrics = train_step(
            self.backend, trajectories, self.config, temperature=temperature, step=step, probe=probe, skips=skips
        )
        sizes = torch.zeros(self.backend.world_size)
        sizes[self.backend.rank] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return {**metrics, "perf/train_rss_mb": float(self.backend.sum_over_ranks(sizes).max())}

    def export(self, version: int, dtype: str) -> tuple[WeightManifest, list[Bucket]]:
        """Manifest and buckets (empty on ranks other than 0); remembers the version for `save`."""
        self.version = version
        return export(self.backend, version, dtype, self.config.bucket_mb)

    def share(self, version: int, dtype: str) -> tuple[WeightManifest, list[ray.ObjectRef]]:
        """`export` with the buckets in the object store."""
        manifest, buckets = self.export(version, dtype)
        return manifest, [ray.put(bucket) for bucket in buckets]

    def save(self, path: Path, beside: Path | None = None) -> None:
        checkpoint.save(self.backend, path, self.version, beside)

    def load(self, path: Path) -> int:
        """Restore a checkpoint; return the weight version it was saved under."""
        self.version = checkpoint.load(self.backend, path)
        return self.version

    def save_hf(self, path: Path) -> None:
        self.backend.save_hf(path)


class _Rank:
    """A worker in its own process, made by a call: what goes wrong is then raised as it is, not as a dead actor."""

    def start(self, *arguments: Any) -> None:
        self.worker = TrainerWorker(*arguments)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.worker, method)(*args, **kwargs)


class TrainerGroup:
    """Creates `config.workers` actors and fans calls out to them. `close` when done.

    What a worker raises is raised here, as soon as any of them does.
    """

    def __init__(self, config: TrainerConfig, target: Path, seed: int) -> None:
        """ValueError for a model or layout that the backend does not take, before anything is started."""
        if config.backend == "megatron":
            check(config, target)
        bundle = {"CPU": config.cpus_per_worker, "GPU": config.gpus_per_worker}
        bundle = {name: amount for name, amount in bundle.items() if amount > 0}
        self.placement = placement_group([bundle] * config.workers, strategy="PACK")
        self.workers: list[Any] = []
        self._timeout_s = config.timeout_s
        try:
            if not self.placement.wait(math.ceil(config.timeout_s)):  # Ray counts whole seconds
                raise TrainerLostError(
                    f"Ray found no room for {config.workers} trainer workers of {bundle} each within "
                    f"trainer.timeout_s = {config.timeout_s:g} s; free resources, add nodes, or lower trainer.workers "
                    "or what a worker reserves"
                )
            address, port = "127.0.0.1", 0
            if config.workers > 1:
                address, port = ray.get(ray.remote(_free_address).options(**self._place(0, {})).remote())
            threads = {"env_vars": {"OMP_NUM_THREADS": str(config.threads)}}
            for rank in range(config.workers):
                actor = ray.remote(_Rank).options(**self._place(rank, bundle), runtime_env=threads)
                self.workers.append(actor.remote())
            _gather(
                "start",
                [
                    worker.start.remote(config, target, seed, rank, config.workers, address, port)
                    for rank, worker in enumerate(self.workers)
                ],
                config.timeout_s,
            )
        except BaseException:
            self.close()
            raise

    def train(
        self, trajectories: Sequence[Trajectory] | ray.ObjectRef, *, temperature: float, step: int = 0,
        probe: Path | None = None, skips: int = 0,
    ) -> dict[str, float]:  # fmt: skip
        """Metrics of one train step, the same on all ranks; the trajectories go into the object store once."""
        shared = trajectories if isinstance(trajectories, ray.ObjectRef) else ray.put(trajectories)
        return self._all("train", shared, temperature=temperature, step=step, probe=probe, skips=skips)[0]

    def share(self, version: int, dtype: str) -> tuple[WeightManifest, list[ray.ObjectRef]]:
        """Rank 0's manifest, and a reference to each bucket; they live as long as the group."""
        return self._all("share", version, dtype)[0]

    def save(self, path: Path, beside: Path | None = None) -> None:
        """See trainer.checkpoint.save; paths are those of a file system that all nodes share."""
        self._all("save", path, beside)

    def load(self, path: Path) -> int:
        return self._all("load", path)[0]

    def save_hf(self, path: Path) -> None:
        self._all("save_hf", path)

    def close(self) -> None:
        """Ends the actors and frees their resources."""
        for worker in self.workers:
            ray.kill(worker)
        remove_placement_group(self.placement)

    def _all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        calls = [worker.call.remote(method, *args, **kwargs) for worker in self.workers]
        return _gather(method, calls, self._timeout_s)

    def _place(self, rank: int, resources: dict[str, float]) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(self.placement, placement_group_bundle_index=rank)
        return {
            "num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0), "scheduling_strategy": strategy,
        }  # fmt: skip


def _gather(method: str, refs: Sequence[ray.ObjectRef], timeout_s: float) -> list[Any]:
    """Results in order. The first failure is raised at once: the peers of a failed rank may wait for it for ever.

    TrainerLostError where a rank died or is silent for `timeout_s`.
    """
    pending, deadline = list(refs), time.monotonic() + timeout_s
    try:
        while pending:
            done, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                silent = [refs.index(ref) for ref in pending]
                raise TrainerLostError(
                    f"trainer ranks {silent} did not finish {method} within {timeout_s:g} s; {RESUME}"
                )
            ray.get(done)
        return ray.get(list(refs))
    except RayTaskError as error:
        raise error.cause from error
    except RayActorError as error:
        reason = " ".join(str(error).split())[:300]
        raise TrainerLostError(f"a trainer rank died in {method}: {reason}; {RESUME}") from error


def _backend(config: TrainerConfig, target: Path, rank: int, world_size: int) -> Backend:
    if config.backend == "torch":
        return TorchBackend(config, target, rank=rank, world_size=world_size)
    from trainer.backends.megatron import MegatronBackend  # an extra that most installations do without

    return MegatronBackend(config, target, rank=rank, world_size=world_size)


def _free_address() -> tuple[str, int]:
    """This node's address and a port that is free on it now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]
