"""Damaged rollout files: ValueError, or what was written; never a crash of another kind, never a shorter array."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from experiments.rollouts import load_rollout, rollout_file
from tests.experiments.runs import save, trajectories

ODD = [-1, -(2**62), 2**62, 2**31, 10**6]
OFFSETS = ["prompt_offsets", "response_offsets", "text_offsets", "support_offsets"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arm")
    save(folder, 0, trajectories(3))
    return rollout_file(folder, 0)


def read(file: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    with safe_open(file, "numpy") as opened:
        return {name: opened.get_tensor(name).copy() for name in opened.keys()}, opened.metadata()  # noqa: SIM118


def refused(file: Path, content: bytes, reason: str = "no sound rollout file") -> None:
    damaged = file.with_name("damaged.safetensors")
    damaged.write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        load_rollout(damaged)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_cut_short_or_grown_is_refused(file: Path, data: st.DataObject) -> None:
    whole = file.read_bytes()
    refused(file, whole[: data.draw(st.integers(0, len(whole) - 1))])
    refused(file, whole + data.draw(st.binary(min_size=1, max_size=9)))


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 4000), bit=st.integers(0, 7))
def test_a_flipped_bit_is_refused_or_changes_values_only(file: Path, place: int, bit: int) -> None:
    whole = bytearray(file.read_bytes())
    whole[place % len(whole)] ^= 1 << bit
    damaged = file.with_name("damaged.safetensors")
    damaged.write_bytes(whole)
    try:
        found = load_rollout(damaged)
    except ValueError:
        return
    sent = load_rollout(file)
    lengths = [len(one.completion) for one in found.trajectories]
    assert sum(lengths) == sum(len(one.completion) for one in sent.trajectories)
    assert all(len(one.loss_mask) == len(one.completion) == len(one.completion.commit) for one in found.trajectories)


@pytest.mark.parametrize("name", OFFSETS)
@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("place", [0, 1, -1])
def test_odd_offsets_are_refused(file: Path, name: str, value: int, place: int) -> None:
    arrays, metadata = read(file)
    arrays[name][place] = value
    save_file(arrays, file.with_name("odd.safetensors"), metadata)
    refused(file, file.with_name("odd.safetensors").read_bytes(), f"{name} are no offsets")


def test_arrays_that_are_missing_or_of_another_length_are_refused(file: Path) -> None:
    arrays, metadata = read(file)
    for name in arrays:
        for change in ({}, {name: arrays[name][:-1]}, {name: np.concatenate([arrays[name], arrays[name][-1:]])}):
            save_file({**{k: v for k, v in arrays.items() if k != name}, **change}, file.with_name("odd"), metadata)
            refused(file, file.with_name("odd").read_bytes())
    for name in ("finish", "engine_id", "draft_digest"):
        for value in (200, -1):
            odd = arrays[name].astype(np.int64)
            odd[0] = value
            save_file(arrays | {name: odd}, file.with_name("odd"), metadata)
            refused(file, file.with_name("odd").read_bytes())
