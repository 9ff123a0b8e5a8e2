"""The 12 sampling settings of the proof table, and what a row is given to work with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING, Any

from miles_ext.sampling import SamplingSpec

if TYPE_CHECKING:
    from experiments.validate.engines import Engines, Model, Sample
    from miles_ext.capability import ArmKind

_CAPTURES: dict[str, dict[str, Any]] = {
    "K32": {"capture": "head", "head_size": 32},
    "K128": {"capture": "head", "head_size": 128},
    "full": {"capture": "complete"},
    "k32 p.95": {"capture": "complete", "top_k": 32, "top_p": 0.95},
    "k128 p.95": {"capture": "complete", "top_k": 128, "top_p": 0.95},
    "p.95": {"capture": "complete", "top_p": 0.95},
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to sample and capture."""

    name: str
    fields: tuple[tuple[str, Any], ...]

    def spec(self, seed: int, **changes: Any) -> SamplingSpec:
        return SamplingSpec(**{**dict(self.fields), **changes}, seed=seed)

    @property
    def temperature(self) -> float:
        return dict(self.fields)["temperature"]


SETTINGS = tuple(
    Setting(f"{name} T{temperature}", tuple({**fields, "temperature": temperature}.items()))
    for name, fields in _CAPTURES.items()
    for temperature in (1.0, 0.7)
)


@dataclass(slots=True)
class Context:
    """engines: the kind of engine under proof. quick: smaller samples, same rows. cases: file given for `filters` or
    `estimator`, None for the published ones. scratch: a folder that is removed afterwards. running: processes that a
    row started before its turn.
    """

    engines: Engines
    quick: bool
    cases: Path | None
    scratch: Path
    samples: dict[tuple[str, str, str], Sample] = field(default_factory=dict)
    running: dict[str, Popen[bytes]] = field(default_factory=dict)

    def pick(self, quick: int, full: int, served: tuple[int, int] | None = None) -> int:
        """served: the two numbers for a server, which takes a second for what the embedded engine does at once."""
        if served is not None and self.engines.name == "sglang":
            quick, full = served
        return quick if self.quick else full

    def sample(self, arm: ArmKind, setting: Setting, model: Model = "spread") -> Sample:
        """Watched responses of one arm and setting, made once and shared by the rows that read them."""
        key = (arm, setting.name, model)
        if key not in self.samples:
            self.samples[key] = self.engines.sample(arm, setting, model, self.pick(8, 24))
        return self.samples[key]

    def settings_of(self, vocab_size: int) -> list[Setting]:
        """The settings that exist over a vocabulary."""
        found = []
        for setting in SETTINGS:
            try:
                setting.spec(0).require_vocabulary(vocab_size)
            except ValueError:
                continue
            found.append(setting)
        return found
