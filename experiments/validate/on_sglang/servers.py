"""Servers of the proof table on sglang: one a kind, started once, asked by every row.

    python -m experiments.validate.on_sglang.servers CONFIG.yaml FOLDER [KIND ...]

starts the named kinds (all without a name), together, notes each in FOLDER/servers.json, and ends them when FOLDER/stop
appears or the process ends. `experiments validate --servers FOLDER` attaches to them and starts what is missing.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import yaml

from experiments.validate.engines import Model
from experiments.validate.models import TOKENIZER, TRAINED, make_spread
from miles_ext.capability import ArmKind
from miles_ext.sglang_plugin.probe import PROBE_VARIABLE
from miles_ext.sglang_plugin.sabotage import SABOTAGE_VARIABLE
from rollout.config import RolloutConfig
from rollout.sglang_engine.engine import SglangEngine

VOCABULARY, CONTEXT, SLOTS = 512, 320, 64
Fault = Literal["", "broken"]
NOTES, STOP = "servers.json", "stop"


@dataclass(frozen=True)
class Kind:
    """fault: `broken` serves with the faults of `miles_ext.sglang_plugin.sabotage`, for controls."""

    arm: ArmKind
    model: Model
    fault: Fault = ""

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.arm, self.model, self.fault)))


KINDS = (
    *(Kind(arm, model) for model in get_args(Model) for arm in get_args(ArmKind)),
    Kind("dflash", "spread", "broken"),
    Kind("dflash2", "spread", "broken"),
)


class Servers:
    """folder: of models, logs, probes and notes. config: how a server is started."""

    def __init__(self, folder: Path, config: RolloutConfig) -> None:
        self.folder, self.config = folder.absolute(), config
        self.models: dict[str, Path] = {"trained": TRAINED, "spread": self.folder / "spread"}
        if not (self.models["spread"] / "draft").exists():
            make_spread(self.models["spread"], VOCABULARY, tokenizer_of=TRAINED / "target")
        self.owned: dict[str, SglangEngine] = {}
        noted = self.folder / NOTES
        self.urls: dict[str, str] = json.loads(noted.read_text()) if noted.exists() else {}

    def url(self, kind: Kind) -> str:
        """Of a running server of this kind; it is started where there is none."""
        if kind.name not in self.urls:
            self.start(kind)
        return self.urls[kind.name]

    def start(self, kind: Kind, target: Path | None = None, name: str = "") -> str:
        """target: other weights than the model's, then with a name of their own."""
        name, model = name or kind.name, self.models[kind.model]
        home, probe = self.folder / name, self.probe(name)
        home.mkdir(parents=True, exist_ok=True)
        probe.mkdir(exist_ok=True)
        added = {PROBE_VARIABLE: str(probe), **({SABOTAGE_VARIABLE: str(probe)} if kind.fault else {})}
        sglang = self.config.sglang
        environment = {**sglang.environment, **added}
        # Flags of the draft mean something where there is one.
        args = tuple(arg for arg in sglang.args if kind.arm != "regular" or "speculative" not in arg)
        changed = sglang.model_copy(update={"environment": environment, "folder": home, "args": args})
        config = self.config.model_copy(update={"sglang": changed})
        self.owned[name] = SglangEngine(config, kind.arm, target or model / "target", model / "draft", name)
        self.urls[name] = self.owned[name].url
        return self.urls[name]

    def probe(self, name: str) -> Path:
        return self.folder / name / "probe"

    def note(self) -> None:
        part = self.folder / f"{NOTES}.{len(self.urls)}"
        part.write_text(json.dumps(dict(self.urls)))
        part.rename(self.folder / NOTES)

    def close(self) -> None:
        """Ends what was started here."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(SglangEngine.close, self.owned.values()))
        self.owned.clear()


def add_tokenizer(source: Path, folder: Path) -> None:
    """sglang serves no folder without one."""
    for file in TOKENIZER:
        shutil.copy(source / file, folder)


def read_config(file: Path) -> RolloutConfig:
    """The section `rollout` of an experiment's file; SGLANG_PYTHON names another interpreter. ValueError where there is
    none."""
    document = yaml.safe_load(file.read_text())
    if not isinstance(document, dict) or not isinstance(document.get("rollout"), dict):
        raise ValueError(f"{file} has no section `rollout`; accepted: the form of experiments/configs/sglang_cpu.yaml")
    config = RolloutConfig.model_validate(document["rollout"])
    if config.engine != "sglang":
        raise ValueError(f"{file} has rollout.engine {config.engine!r}; accepted here: sglang")
    named = os.environ.get("SGLANG_PYTHON")
    sglang = config.sglang.model_copy(update={"python": Path(named)} if named else {})
    return config.model_copy(update={"sglang": sglang, "context_length": CONTEXT, "max_concurrency": SLOTS})


def main(config: Path, folder: Path, names: list[str]) -> None:
    from experiments.validate import handoff  # which imports this module

    servers = Servers(folder, read_config(config))
    chosen = [kind for kind in KINDS if kind.name in names or not names]
    fresh = servers.folder / handoff.FRESH
    handoff.save_changed(servers.models["spread"] / "target", fresh)
    add_tokenizer(servers.models["spread"] / "target", fresh)
    (folder / STOP).unlink(missing_ok=True)
    first = time.monotonic()

    def start(kind: Kind) -> None:
        try:
            servers.start(kind)
        except Exception as error:
            print(f"{kind.name}: {error}", flush=True)
            return
        servers.note()
        print(f"{kind.name} at {servers.urls[kind.name]} after {time.monotonic() - first:.0f} s", flush=True)

    try:
        # A cold start on a CPU wants a core; on a GPU it mostly waits.
        with ThreadPoolExecutor(os.cpu_count() if servers.config.device == "cpu" else None) as pool:
            loaded = pool.submit(servers.start, Kind("regular", "spread"), fresh, f"regular-spread-{fresh.name}")
            list(pool.map(start, chosen))
            loaded.result()
        servers.note()
        while not (folder / STOP).exists():
            time.sleep(0.5)
    finally:
        servers.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
