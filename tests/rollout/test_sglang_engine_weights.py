"""Handoffs over HTTP: whole or not at all, and never into the draft."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from miles_ext.errors import EngineError, WeightError
from miles_ext.tensors import entries, to_array
from miles_ext.weights import WeightManifest
from rollout.config import RolloutConfig
from rollout.sglang_engine.config import SglangConfig
from rollout.sglang_engine.engine import SglangEngine
from tests.rollout.served import TINY, request
from tests.rollout.updatable import Server, updatable

Transport = Literal["disk", "tensor"]


@pytest.fixture(scope="module", params=["disk", "tensor"])
def transport(request: pytest.FixtureRequest) -> Transport:
    return request.param


@pytest.fixture
def server() -> Iterator[Server]:
    with updatable() as one:
        yield one


@pytest.fixture
def engine(server: Server, transport: Transport, tmp_path: Path) -> Iterator[SglangEngine]:
    sglang = SglangConfig(transport=transport, folder=tmp_path)
    config = RolloutConfig(engine="sglang", max_concurrency=4, sglang=sglang)
    one = SglangEngine(config, "dflash2", TINY / "target", TINY / "draft", "worker-0", server.url)
    yield one
    one.close()
    assert list(tmp_path.iterdir()) == []


def handoff(version: int, by: float = 0.01, **changes: Any) -> tuple[WeightManifest, list[dict[str, np.ndarray]]]:
    """The shipped target plus `by`, in two buckets."""
    tensors = {name: t.float() + by for name, t in load_file(TINY / "target" / "model.safetensors").items()} | changes
    arrays = {name: to_array(tensor) for name, tensor in tensors.items()}
    names = sorted(arrays)
    manifest = WeightManifest(version=version, tensors=entries(tensors))
    return manifest, [{name: arrays[name] for name in names[:9]}, {name: arrays[name] for name in names[9:]}]


def test_two_handoffs(engine: SglangEngine, server: Server, transport: Transport, tmp_path: Path) -> None:
    (before,) = engine.capability()
    manifest, buckets = handoff(1)
    one = engine.update_weights(manifest, buckets)
    apply = ["disk 1"] if transport == "disk" else ["begin", "tensor", "tensor", "end"]
    assert server.calls == ["pause", *apply, "continue"]
    assert (one.version, one.received_digest, one.draft_digest) == (1, manifest.digest, before.draft_digest)
    assert one.resident_digest not in ("", before.resident_digest) and one.seconds > 0
    (made,) = engine.generate([request()])
    assert set(made.weight_version) == {1}

    with pytest.raises(WeightError, match="does not rise above 1"):
        engine.update_weights(*handoff(1, by=0.0))
    two = engine.update_weights(*handoff(2, by=0.0))
    assert (two.resident_digest, two.draft_digest) == (before.resident_digest, before.draft_digest)
    (folder,) = tmp_path.iterdir()
    assert [path.name for path in folder.iterdir()] == ["version-2"]  # what a failed handoff would go back to


def test_who_attaches_next_counts_from_its_own_versions(engine: SglangEngine, server: Server) -> None:
    """A worker in the place of a dead one is fed what the server has already; another run starts anew."""
    engine.update_weights(*handoff(7))
    for version in (7, 1):
        again = SglangEngine(
            RolloutConfig(engine="sglang"), "dflash2", TINY / "target", TINY / "draft", "worker-1", server.url
        )
        assert again.update_weights(*handoff(version)).version == version
        again.close()


FAULTS = {"refused": "no such file", "other bytes": "reports version and received", "draft bit": "draft digests"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_handoff_that_fails_leaves_the_old_weights(engine: SglangEngine, server: Server, fault: Any) -> None:
    first = engine.update_weights(*handoff(1))
    server.fault = fault
    with pytest.raises(WeightError, match=FAULTS[fault]):
        engine.update_weights(*handoff(2, by=0.5))
    (after,) = engine.capability()
    assert (after.weight_version, after.resident_digest) == (1, first.resident_digest)
    assert (server.calls[-1], engine.healthy()) == ("continue", True)
    if fault != "draft bit":
        assert engine.update_weights(*handoff(2, by=0.5)).version == 2


def test_weights_that_cannot_be_brought_back_end_the_engine(engine: SglangEngine, server: Server) -> None:
    server.fault = "for good"
    with pytest.raises(EngineError, match="the old weights could not be brought back"):
        engine.update_weights(*handoff(1))
    assert server.calls[-1] != "continue"  # nothing is sampled from weights that nobody knows


def test_a_server_that_dies_meanwhile_is_an_engine_error(engine: SglangEngine, server: Server) -> None:
    server.fault = "dead"
    with pytest.raises(EngineError, match="answers 500: scheduler died"):
        engine.update_weights(*handoff(1))


def test_what_does_not_add_up_never_reaches_the_server(engine: SglangEngine, server: Server, tmp_path: Path) -> None:
    manifest, (first, second) = handoff(1)
    name = sorted(first)[0]
    flipped = {**first, name: first[name].copy()}
    flipped[name].view(np.uint32).flat[0] ^= 1
    for buckets, words in (
        ([flipped, second], name),
        ([first], "did not arrive whole"),
        ([first, first, second], "arrived twice"),
        ([first, {**second, "extra": first[name]}], "are not in its manifest"),
    ):
        with pytest.raises(WeightError, match=words):
            engine.update_weights(manifest, buckets)
    misfits: tuple[tuple[dict[str, Any], str], ...] = (
        ({"model.norm.weight": torch.zeros(3)}, r"\(3,\), the target has \(64,\)"),
        ({"extra": torch.zeros(3)}, "none of that name"),
    )
    for changes, words in misfits:
        with pytest.raises(WeightError, match=words):
            engine.update_weights(*handoff(1, **changes))
    with pytest.raises(WeightError, match="this engine applies none"):
        engine.update_weights(WeightManifest(version=1, tensors=manifest.tensors, transform={"a": 1}), [first, second])
    assert server.calls == []
    (folder,) = tmp_path.iterdir()
    assert list(folder.iterdir()) == []


def test_a_target_of_several_files_is_read_whole(tmp_path: Path) -> None:
    from rollout.sglang_engine.staging import shapes

    whole = shapes(TINY / "target")
    shutil.copy(TINY / "target" / "model.safetensors", tmp_path / "model-00001-of-00002.safetensors")
    torch_file = load_file(TINY / "draft" / "model.safetensors")
    from safetensors.torch import save_file

    save_file({"beside": next(iter(torch_file.values()))}, tmp_path / "model-00002-of-00002.safetensors")
    assert shapes(tmp_path).keys() == whole.keys() | {"beside"}
