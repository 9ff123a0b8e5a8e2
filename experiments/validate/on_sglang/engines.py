"""The real sglang under proof: its servers, its probe, and its own functions in its own interpreter."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import httpx

from experiments.validate.embedded import Logits, prompts_for
from experiments.validate.engines import Model, Sample
from experiments.validate.on_sglang import laws as functions
from experiments.validate.on_sglang.servers import VOCABULARY, Fault, Kind, Servers, add_tokenizer
from experiments.validate.on_sglang.witness import ServerWatch
from experiments.validate.settings import Setting
from miles_ext.capability import ArmKind
from miles_ext.records import Completion, SupportRows
from miles_ext.sampling import FilterOrder, SamplingSpec
from miles_ext.sglang_plugin.probe import SEED
from miles_ext.sglang_plugin.sabotage import FLIP
from rollout.config import RolloutConfig
from rollout.engine import Engine, Request
from rollout.sglang_engine.engine import SglangEngine
from rollout.sglang_engine.launch import environment


class SglangEngines:
    """See `engines.Engines`. Servers are shared: `open` attaches to one, and closing what it gave leaves it running."""

    name = "sglang"
    arms: tuple[ArmKind, ...] = ("regular", "dflash", "dflash2")
    vocab_size = VOCABULARY
    order: FilterOrder | None
    # bfloat16 weights and activations, other kernels than the trainer's: single tokens may be off by tenths of a nat.
    trainer_gap: tuple[Literal["max", "mean"], float] = ("mean", 0.05)

    def __init__(self, scratch: Path, config: RolloutConfig, servers: Path | None = None) -> None:
        self.config, self.dtype = config, config.dtype
        self.allow_test_verifier = config.accepts_test_verifier
        self.servers = Servers(servers or scratch / "servers", config)
        self.order = config.sglang.filter_order
        self.names: dict[str, str] = {}  # server by address

    def close(self) -> None:
        self.servers.close()

    def target(self, model: Model) -> Path:
        return self.servers.models[model] / "target"

    def open(self, arm: ArmKind, model: Model = "spread", **changes: Any) -> SglangEngine:
        """changes: `target` starts a server of its own with these weights, `fault` takes the kind that has it, `router`
        asks for responses there."""
        kind = Kind(arm, model, cast(Fault, changes.pop("fault", "")))
        target = changes.pop("target", None)
        if target is None:
            name, url = kind.name, self.servers.url(kind)
        else:
            name = f"{kind.name}-{Path(target).name}"
            add_tokenizer(self.target(model), Path(target))
            url = self.servers.urls.get(name) or self.servers.start(kind, target, name)
        self.names[url] = name
        sglang = self.config.sglang.model_copy(update={"router": changes.pop("router", "")})
        config = self.config.model_copy(update={**changes, "sglang": sglang})
        return SglangEngine(config, arm, target or self.target(model), None, name, url)

    def folder(self, engine: Engine) -> Path:
        return self.servers.probe(self.names[cast(SglangEngine, engine).url])

    @contextmanager
    def watch(self, engine: Engine) -> Iterator[ServerWatch]:
        watch = ServerWatch(self.folder(engine))
        with watch.installed(cast(SglangEngine, engine)):
            yield watch

    def sample(self, arm: ArmKind, setting: Setting, model: Model, count: int) -> Sample:
        engine = self.open(arm, model)
        requests = self.requests(setting, count, model)
        with self.watch(engine) as watch:
            completions = engine.generate(requests)
        return Sample(setting, requests, completions, [watch.of(request) for request in requests])

    def requests(self, setting: Setting, count: int, model: Model, seed: int = 0, tokens: int = 24) -> list[Request]:
        return prompts_for(setting, count, model, self.vocab_size, seed, tokens)

    def replay(self, engine: Engine, requests: Sequence[Request]) -> list[Completion]:
        """One at a time, on an empty cache, with the server's generator set to the request's seed before each."""
        served, answers = cast(SglangEngine, engine), []
        for request in requests:
            self.reset(engine, request.spec.seed)
            answers += served.generate([request])
        return answers

    def reset(self, engine: Engine, seed: int) -> None:
        httpx.post(f"{cast(SglangEngine, engine).url}/flush_cache", timeout=60).raise_for_status()
        (self.folder(engine) / f"{SEED}.part").write_text(str(seed))
        (self.folder(engine) / f"{SEED}.part").rename(self.folder(engine) / SEED)

    @contextmanager
    def serve(self, engine: Engine, model: Model) -> Iterator[str]:
        yield cast(SglangEngine, engine).url

    @contextmanager
    def broken(self, arm: ArmKind, **changes: Any) -> Iterator[Engine]:
        yield self.open(arm, "spread", fault="broken", **changes)

    def corrupt_draft(self, engine: Engine) -> None:
        file = self.folder(engine) / FLIP
        file.touch()
        engine.healthy()  # the next step flips it
        if file.exists():
            raise RuntimeError(f"{file} is still there: the server has no sabotage, or serves without a draft")

    def put_back(self, model: Model, arms: Sequence[ArmKind]) -> None:
        """Hand servers the weights that they were started with, after a row that changed them."""
        from trainer.backends.torch import TorchBackend
        from trainer.config import TrainerConfig
        from trainer.handoff import export

        backend = TorchBackend(TrainerConfig(device="cpu"), self.target(model))
        for arm in arms:
            self.open(arm, model).update_weights(*export(backend, 0, self.dtype))

    def laws(self, logits: Sequence[Logits], specs: Sequence[SamplingSpec]) -> dict[str, list[SupportRows]]:
        return functions.decode(self._run(logits, specs, "rows"))

    def bare_laws(
        self, logits: Sequence[Logits], specs: Sequence[SamplingSpec], mode: functions.Mode
    ) -> dict[str, list[Logits]]:
        """The law of each case as it is drawn from, with the plugin (`laws`) and without (`stock`), for each path."""
        return functions.dense(self._run(logits, specs, mode))

    def _run(self, logits: Sequence[Logits], specs: Sequence[SamplingSpec], mode: functions.Mode) -> Path:
        """Runs `laws` in the servers' interpreter; the file that it wrote."""
        folder = Path(tempfile.mkdtemp(prefix=f"laws-{mode}-", dir=self.servers.folder))
        functions.write_cases(folder / "cases.npz", logits, specs)
        variables = environment(self.config, "functions")
        device = "cpu" if self.config.device == "cpu" else "cuda"
        command = [str(self.config.sglang.python.absolute()), "-m", functions.__name__, str(folder), device, mode]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"sglang's functions failed:\n{done.stderr[-3000:]}")
        return folder / "laws.npz"
