"""The handoff: all or nothing, target only, and seen by every later response."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from miles_ext.capability import ArmKind
from miles_ext.errors import WeightError
from miles_ext.tensors import entries, to_array
from miles_ext.weights import WeightManifest
from rollout.embedded.decoder import Decoder
from rollout.embedded.engine import EmbeddedEngine
from rollout.engine import Bucket
from tests.rollout.tiny import ARMS, DEVICES, VOCAB, Reference, dense, requests, write_target


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("other"), seed=5)


def _export(folder: Path, version: int = 1) -> tuple[WeightManifest, list[Bucket]]:
    tensors = {name: tensor.clone() for name, tensor in Decoder.from_hf(folder).named_hf_tensors()}
    names = list(tensors)
    buckets: list[Bucket] = [{name: to_array(tensors[name]) for name in part} for part in (names[:3], names[3:])]
    return WeightManifest(version=version, tensors=entries(tensors)), buckets


def _engine(target: Path, draft: Path, arm: ArmKind = "dflash2", **settings) -> EmbeddedEngine:
    return EmbeddedEngine(target, draft, arm, max_concurrency=8, context_length=64, **settings)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("arm", ARMS)
def test_new_weights_serve_and_the_draft_stays(
    arm: ArmKind, device: str, target: Path, draft: Path, other: Path
) -> None:
    engine, fresh = _engine(target, draft, arm, device=device), _engine(other, draft, arm, device=device)
    manifest, buckets = _export(other)
    (before,) = engine.capability()
    report = engine.update_weights(manifest, iter(buckets))
    (after,) = engine.capability()
    assert report.version == after.weight_version == 1 and report.received_digest == manifest.digest
    assert report.resident_digest == after.resident_digest == fresh.capability()[0].resident_digest
    assert report.draft_digest == after.draft_digest == before.draft_digest
    assert before.resident_digest != after.resident_digest
    wanted, reference = requests(8), Reference(other)
    for request, one, expected in zip(wanted, engine.generate(wanted), fresh.generate(wanted), strict=True):
        assert one.response_ids.tolist() == expected.response_ids.tolist()
        assert (one.weight_version == 1).all() and (expected.weight_version == 0).all()
        assert np.abs(dense(one, VOCAB) - reference.laws(one, request.spec)).sum(-1).max() <= 2e-5


def test_an_identity_handoff_changes_nothing(target: Path, draft: Path) -> None:
    engine = _engine(target, draft)
    before = engine.generate(requests(8))
    resident = engine.capability()[0].resident_digest
    for version in (1, 2):
        assert engine.update_weights(*_export(target, version)).resident_digest == resident
    for one, other in zip(before, engine.generate(requests(8)), strict=True):
        assert one.response_ids.tolist() == other.response_ids.tolist() and one.spec == other.spec


def _flip(bucket: Bucket) -> Bucket:
    name = next(iter(bucket))
    changed = bucket[name].copy()
    changed.view(np.uint8).reshape(-1)[5] ^= 1
    return {**bucket, name: changed}


def _renamed(manifest: WeightManifest, buckets: list[Bucket]) -> tuple[WeightManifest, list[Bucket]]:
    tensors = dict(manifest.tensors)
    tensors["model.unknown.weight"] = tensors.pop("model.norm.weight")
    return replace(manifest, tensors=tensors), buckets


FAULTS = {
    "a bit flipped on the way": (lambda m, b: (m, [b[0], _flip(b[1])]), "different"),
    "a bucket lost": (lambda m, b: (m, b[:1]), "missing"),
    "a bucket sent twice": (lambda m, b: (m, [*b, b[0]]), "arrived twice"),
    "a stranger among them": (lambda m, b: (m, [*b, {"x": np.zeros(3, np.float32)}]), "not listed"),
    "another architecture": (_renamed, "model.norm.weight"),
    "an unknown transform": (lambda m, b: (replace(m, transform={"quantise": "fp8"}), b), "fp8.*accepted"),
    "noise without a seed": (lambda m, b: (replace(m, transform={"noise": 0.1}), b), "seed"),
    "a transform of strangers": (lambda m, b: (replace(m, transform={"quantise": "int8", "x": 1}), b), "'x': 1"),
    "an old version": (lambda m, b: (replace(m, version=0), b), "does not rise"),
    "an empty manifest": (lambda m, b: (replace(m, tensors={}), []), "does not fit"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_handoff_changes_nothing(fault: str, target: Path, draft: Path, other: Path) -> None:
    engine = _engine(target, draft)
    (before,), spoil = engine.capability(), FAULTS[fault]
    with pytest.raises(WeightError, match=spoil[1]):
        engine.update_weights(*spoil[0](*_export(other)))
    assert engine.capability() == [before]
    assert engine.update_weights(*_export(other)).version == 1, "the engine must go on"


def test_a_source_that_breaks_off_changes_nothing(target: Path, draft: Path, other: Path) -> None:
    engine = _engine(target, draft)
    (before,) = engine.capability()
    manifest, buckets = _export(other)

    def broken():
        yield buckets[0]
        raise ConnectionError("the trainer died")

    with pytest.raises(ConnectionError):
        engine.update_weights(manifest, broken())
    assert engine.capability() == [before]


@pytest.mark.parametrize("when", ["before", "by"])
def test_a_flipped_bit_of_the_draft_is_noticed(
    when: str, target: Path, draft: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, handoff = _engine(target, draft), _export(other)
    resident = engine.capability()[0].resident_digest
    assert engine.draft is not None
    private = engine.draft.private_tensors()["mask_embedding"]
    if when == "before":
        private.view(torch.int32)[3] ^= 1
    else:  # the update itself writes where it must not
        honest = Decoder.load_hf_tensors

        def overreaching(self: Decoder, tensors) -> None:
            honest(self, tensors)
            private.view(torch.int32)[3] ^= 1

        monkeypatch.setattr(Decoder, "load_hf_tensors", overreaching)
    with pytest.raises(WeightError, match=f"private bytes changed {when} the update"):
        engine.update_weights(*handoff)
    assert engine.weight_version == 0 and engine.capability()[0].resident_digest == resident
