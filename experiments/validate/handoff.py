"""Row `handoff`: new target weights arrive whole or not at all, and the draft's private bytes stay what they were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from experiments.evidence import Row, all_of, must_fail
from experiments.validate.on_sglang.engines import SglangEngines
from experiments.validate.settings import SETTINGS, Context
from miles_ext.capability import ArmKind
from miles_ext.errors import WeightError
from miles_ext.records import Completion
from miles_ext.weights import WeightManifest
from rollout.engine import Engine
from trainer.backends.torch import TorchBackend
from trainer.config import TrainerConfig
from trainer.handoff import Bucket, export

FRESH = "fresh"
SETTING = SETTINGS[4]  # whole laws at temperature 1


def rows(context: Context) -> list[Row]:
    found = []
    for arm in context.engines.arms:
        checks = Checks(context, arm)
        try:
            proved, refused = checks.accepted(), checks.refused()
        finally:
            checks.put_back()
        found += [
            all_of(f"handoff/{arm}", sum(proved.values()), len(proved), _named(proved)),
            all_of(f"handoff/{arm}_all_or_nothing", sum(refused.values()), len(refused), _named(refused)),
        ]
        if arm != "regular":
            found.append(checks.draft_bit())
    return found


@dataclass(slots=True)
class Served:
    """What an engine serves now: responses to the same requests, and its digests."""

    completions: list[Completion]
    version: int
    resident: str
    draft: str

    def same_tokens(self, other: Served) -> bool:
        pairs = zip(self.completions, other.completions, strict=True)
        return all(np.array_equal(a.response_ids, b.response_ids) for a, b in pairs)

    @property
    def accept_length(self) -> float:
        steps = sum(completion.spec.live_steps for completion in self.completions)
        return sum(map(len, self.completions)) / steps


class Checks:
    """One engine of one arm and a trainer of the same target."""

    def __init__(self, context: Context, arm: ArmKind) -> None:
        self.context = context
        self.arm: ArmKind = arm
        self.engine = context.engines.open(arm)
        self.backend = TorchBackend(TrainerConfig(device="cpu"), context.engines.target("spread"))
        self.requests = context.engines.requests(SETTING, context.pick(8, 32, served=(3, 12)), "spread")

    def served(self, engine: Engine | None = None) -> Served:
        engine = engine or self.engine
        (capability, *_) = engine.capability()
        completions = self.context.engines.replay(engine, self.requests)
        return Served(completions, capability.weight_version, capability.resident_digest, capability.draft_digest)

    def accepted(self) -> dict[str, bool]:
        """An identity handoff, then two of changed weights, each compared with what was sent and a fresh engine."""
        first = self.served()
        manifest, buckets = self.export(5)
        report = self.engine.update_weights(manifest, buckets)
        again = self.served()
        proved = {
            "identity: received is sent": report.received_digest == manifest.digest,
            "identity: same resident digest": again.resident == first.resident == report.resident_digest,
            "identity: same tokens": again.same_tokens(first),
            "identity: same accept length": again.accept_length == first.accept_length,
            "identity: version": again.version == 5,
        }
        for number in (1, 2):
            self.change_weights(number)
            manifest, buckets = self.export(5 + number)
            report = self.engine.update_weights(manifest, buckets)
            now = self.served()
            versions = {int(version) for completion in now.completions for version in completion.weight_version}
            proved |= {
                f"handoff {number}: received is sent": report.received_digest == manifest.digest,
                f"handoff {number}: other weights": now.resident != again.resident,
                f"handoff {number}: draft unchanged": now.draft == first.draft == report.draft_digest,
                f"handoff {number}: version on every token": versions == {5 + number} == {now.version},
            }
            if number == 2 or self.context.engines.name == "embedded":
                proved[f"handoff {number}: as if loaded"] = self.as_if_loaded(now)
        return proved

    def export(self, version: int) -> tuple[WeightManifest, list[Bucket]]:
        return export(self.backend, version, self.context.engines.dtype)

    def put_back(self) -> None:
        """A server outlives the row: it gets the weights that it was started with."""
        if isinstance(self.context.engines, SglangEngines):
            self.context.engines.put_back("spread", [self.arm])

    def refused(self) -> dict[str, bool]:
        """Deliveries that do not add up: refused, with the old weights and version still serving."""
        self.change_weights(3)
        manifest, buckets = self.export(20)
        name = next(iter(buckets[0]))
        flipped = {**buckets[0], name: buckets[0][name].copy()}
        flipped[name].reshape(-1).view(np.uint8)[0] ^= 1
        missing = {key: value for key, value in buckets[0].items() if key != name}
        old = WeightManifest(version=7, tensors=manifest.tensors)
        extra = WeightManifest(version=20, tensors={**manifest.tensors, "draft.fc.weight": manifest.tensors[name]})
        return {
            "one bit flipped": self.kept_after(lambda: self.engine.update_weights(manifest, [flipped, *buckets[1:]])),
            "a tensor missing": self.kept_after(lambda: self.engine.update_weights(manifest, [missing, *buckets[1:]])),
            "a version that does not rise": self.kept_after(lambda: self.engine.update_weights(old, buckets)),
            "a tensor of the draft": self.kept_after(
                lambda: self.engine.update_weights(extra, [{**buckets[0], "draft.fc.weight": buckets[0][name]}])
            ),
        }

    def kept_after(self, deliver: Callable[[], object], engine: Engine | None = None) -> bool:
        before = self.served(engine)
        try:
            deliver()
        except WeightError:
            after = self.served(engine)
            return after.same_tokens(before) and (after.version, after.resident) == (before.version, before.resident)
        return False

    def draft_bit(self) -> Row:
        """One bit of the draft flipped: its digest changes and the next handoff is refused."""
        engines = self.context.engines
        with engines.broken(self.arm) as engine:
            before = self.served(engine).draft
            engines.corrupt_draft(engine)
            # A server computes digests when weights change, and judges the draft at the next handoff.
            unseen = engines.name == "embedded" and self.served(engine).draft == before
            manifest, buckets = self.export(30)
            accepted = not self.kept_after(lambda: engine.update_weights(manifest, buckets), engine)
            unseen = unseen or engine.capability()[0].draft_digest == before
            engines.corrupt_draft(engine)
        detail = f"digest {'as before' if unseen else 'changed'}, handoff {'accepted' if accepted else 'refused'}"
        proof = unseen or accepted
        row = Row(f"handoff/control_{self.arm}_draft", float(proof), "", "draft proved unchanged", proof, detail)
        return must_fail(row, "one bit of the draft flipped")

    def change_weights(self, seed: int) -> None:
        change_weights(self.backend, seed)

    def as_if_loaded(self, now: Served) -> bool:
        """Against an engine that loaded the trainer's weights from disk. Of sglang one is started, for every arm: its
        target is the same in all of them."""
        engines = self.context.engines
        arm: ArmKind = "regular" if engines.name == "sglang" else self.arm
        folder = Path(self.context.scratch) / FRESH
        if not (folder.exists() and engines.name == "sglang"):
            self.backend.save_hf(folder)
        engine = engines.open(arm, "spread", target=folder)
        fresh = self.served(engine)
        engine.close()
        return now.resident == fresh.resident and (arm != self.arm or now.same_tokens(fresh))


def change_weights(backend: TorchBackend, seed: int) -> None:
    """What an optimizer step does to them, in size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in backend.parameters.values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)


def save_changed(target: Path, folder: Path) -> None:
    """The weights of the row's second handoff, for an engine that loads them from disk."""
    backend = TorchBackend(TrainerConfig(device="cpu"), target)
    for seed in (1, 2):
        change_weights(backend, seed)
    backend.save_hf(folder)


def _named(checks: dict[str, bool]) -> str:
    wrong = [name for name, holds in checks.items() if not holds]
    return "NOT " + "; NOT ".join(wrong) if wrong else "; ".join(checks)
