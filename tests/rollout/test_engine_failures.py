"""What must not take the engine down: lost laws, supports past their cap, foreign checkpoints, odd dtypes."""

from __future__ import annotations

import json
import resource
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_ext.capability import ArmKind, require
from miles_ext.errors import CapabilityError, CheckpointError
from miles_ext.records import Completion, Status
from miles_ext.sampling import SamplingSpec
from rollout.embedded.engine import EmbeddedEngine
from tests.rollout.tiny import ARMS, DEVICES, VOCAB, Reference, dense, requests, write_draft


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("arm", ARMS)
def test_a_support_past_its_cap_ends_that_response_only(arm: ArmKind, device: str, target: Path, draft: Path) -> None:
    cap = 6
    wide = requests(24, max_new_tokens=30, top_p=0.9)
    wanted = [replace(one, spec=replace(one.spec, max_support=cap)) for one in wide[:16]] + wide[16:]
    engine = EmbeddedEngine(target, draft, arm, device=device, max_concurrency=8, context_length=64)
    reference = Reference(target)
    overflowed = 0
    for request, one, free in zip(wanted, engine.generate(wanted), engine.generate(wide), strict=True):
        one.check(VOCAB)
        assert one.support is not None
        assert one.response_ids.tolist() == free.response_ids[: len(one)].tolist()
        if one.worst_status == Status.OK:
            assert one.finish_reason == "length" and (
                request.spec.max_support > cap or (one.support.lengths <= cap).all()
            )
            continue
        overflowed += 1
        assert one.finish_reason == "abort" and one.support.status[-1] == Status.OVERFLOW
        assert not one.support.status[:-1].any() and one.support.lengths[-1] == 0
        sizes = (reference.laws(one, request.spec) > 0).sum(-1)
        assert sizes[-1] > cap and (sizes[:-1] <= cap).all()
    assert 0 < overflowed <= 16


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("arm", ARMS)
def test_a_lost_law_aborts_its_request_and_spares_the_others(
    arm: ArmKind, device: str, target: Path, draft: Path
) -> None:
    """The embedding row of one token is NaN: whoever feeds that token gets no law for the next one. A block that drafts
    it loses its laws too, and says so."""
    engine = EmbeddedEngine(target, draft, arm, device=device, max_concurrency=8, context_length=64)
    wanted = requests(24, max_new_tokens=30) + requests(8, seed=30, max_new_tokens=30, capture="off")
    poison = 7
    wanted = [one for one in wanted if poison not in one.prompt_ids]
    clean = engine.generate(wanted)
    engine.target.embedding[poison] = torch.nan
    aborted = 0
    for before, after in zip(clean, engine.generate(wanted), strict=True):
        after.check(VOCAB)
        length = len(after) - (after.finish_reason == "abort")
        assert after.response_ids[:length].tolist() == before.response_ids[:length].tolist()
        assert poison not in after.response_ids[: length - 1]
        if after.finish_reason == "abort":
            aborted += 1
            assert after.support is None or after.support.status.tolist() == [Status.OK] * length + [Status.INVALID]
            assert arm != "regular" or before.response_ids[length - 1] == poison
        else:
            assert after.finish_reason == "length" and length == 30
    assert 3 < aborted < len(wanted) - 3


def test_no_law_at_all_aborts_every_request_and_shows_as_sick(target: Path) -> None:
    engine = EmbeddedEngine(target, context_length=64)
    assert engine.healthy()
    engine.target.head.fill_(torch.nan)
    done = engine.generate(requests(3))
    assert [(len(one), one.finish_reason, int(one.worst_status)) for one in done] == [(1, "abort", 2)] * 3
    assert not engine.healthy()


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("arm", ARMS)
def test_other_dtypes(arm: ArmKind, device: str, dtype: str, target: Path, draft: Path) -> None:
    engine = EmbeddedEngine(target, draft, arm, device=device, dtype=dtype, max_concurrency=8, context_length=64)
    wanted = requests(6) + requests(6, capture="head", head_size=8) + requests(6, top_k=5, top_p=0.9)
    reference = Reference(target)
    for request, one in zip(wanted, engine.generate(wanted), strict=True):
        one.check(VOCAB)
        if dtype == "float64":
            found = dense(one, VOCAB)
            gap = np.where(np.isnan(found), 0, found - reference.laws(one, request.spec))
            assert np.abs(gap).sum(-1).max() < 1e-6  # stored as float32, computed in float64


def test_capability_is_what_was_loaded(target: Path, draft: Path) -> None:
    for arm in ARMS:
        engine = EmbeddedEngine(target, draft, arm, context_length=64, engine_id="e")
        (found,) = engine.capability()
        for spec in (SamplingSpec(top_k=3, filter_order="joint"), SamplingSpec(capture="head"), SamplingSpec()):
            require(found, spec, arm)
        for other in set(ARMS) - {arm}:
            with pytest.raises(CapabilityError, match=f"wanted '{other}'"):
                require(found, SamplingSpec(), other)
        assert (found.draft_digest == "") == (arm == "regular") and found.vocab_size == VOCAB
        resident = found.resident_digest
        engine.target.norm[0] += 1
        assert engine.capability()[0].resident_digest != resident
        assert all(
            one.engine_id == "e" and one.draft_digest == found.draft_digest for one in engine.generate(requests(1))
        )


def _edited(folder: Path, source: Path, config: dict | None = None, drop: str | None = None) -> Path:
    shutil.copytree(source, folder)
    if config:
        found = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**found, **config}))
    if drop:
        tensors = load_file(folder / "model.safetensors")
        del tensors[next(name for name in tensors if drop in name)]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_checkpoints_that_do_not_fit_are_refused(target: Path, draft: Path, tmp_path: Path) -> None:
    def refuse(message: str, *args, kind: type[Exception] = ValueError, **settings) -> None:
        with pytest.raises(kind, match=message):
            EmbeddedEngine(*args, **settings)

    refuse("arm is 'eagle'; accepted: regular, dflash, dflash2", target, draft, "eagle")
    refuse("needs a draft checkpoint", target, None, "dflash", kind=CheckpointError)
    plain = write_draft(tmp_path / "plain", target, selector=False)
    refuse("needs a path selector", target, plain, "dflash2", kind=CheckpointError, context_length=64)
    EmbeddedEngine(target, plain, "dflash", context_length=64)
    refuse("context_length is 1000; accepted: 2 to the 96", target, context_length=1000)
    refuse("dtype is 'int8'", target, dtype="int8", context_length=64)
    refuse("does not exist", tmp_path / "nowhere")
    refuse("hidden_size", target, _edited(tmp_path / "wide", draft, {"hidden_size": 64}), "dflash2", context_length=64)
    refuse("vocab", target, _edited(tmp_path / "vocab", draft, {"vocab_size": 50}), "dflash2", context_length=64)
    refuse("missing", target, _edited(tmp_path / "less", draft, drop="layers.0.mlp"), "dflash2", context_length=64)
    refuse("missing", _edited(tmp_path / "target", target, drop="q_proj"), context_length=64)


def test_memory_stays_modest(target: Path, draft: Path) -> None:
    """A long session keeps no more than its rows: heads of 8 entries for 32 x 50 tokens are well under a megabyte."""
    engine = EmbeddedEngine(target, draft, "dflash2", max_concurrency=16, context_length=64)
    wanted = requests(32, max_new_tokens=50, capture="head", head_size=8)

    def held(done: list[Completion]) -> int:
        return sum(one.support.token_ids.nbytes + one.support.logprobs.nbytes for one in done if one.support)

    engine.generate(wanted)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(4):
        assert held(engine.generate(wanted)) == 32 * 50 * 8 * 8
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * (1 if sys.platform == "darwin" else 1024) < 32 << 20
