"""Rows as a client decodes them, against what an independent witness saw: the kernel's own input, and the logits."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from miles_ext.sampling import SamplingSpec
from miles_ext.sglang_plugin.probe import PROBE_VARIABLE, WATCH
from tests.sglang_cpu.answers import PROMPTS, VOCABULARY, Answer, ask, check
from tests.sglang_cpu.server import Server, start

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(600)]
SPECS = [
    SamplingSpec(temperature=0.7, top_k=32, top_p=0.95),
    SamplingSpec(top_p=0.95),
    SamplingSpec(),
    SamplingSpec(temperature=0.7, capture="head", head_size=32),
]


@pytest.fixture(scope="module")
def witnessed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    folder = tmp_path_factory.mktemp("probe")
    steps = folder / "steps"
    started = start("dflash2", folder, SGLANG_TEST_RETRACT="0", **{PROBE_VARIABLE: str(steps)})
    (steps / WATCH).touch()
    try:
        yield started, steps
    finally:
        started.stop()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.capture}-k{spec.top_k}-p{spec.top_p}")
def test_rows_equal_the_kernels_input_and_the_law_of_its_logits(
    witnessed: tuple[Server, Path], spec: SamplingSpec
) -> None:
    server, steps = witnessed
    for path in steps.glob("*.safetensors"):
        path.unlink()
    compared = 0
    for answer in ask(server, PROMPTS, spec, max_new_tokens=40):
        check(answer)
        for t, (logits, probs) in enumerate(seen(steps, answer)):
            got = np.zeros(VOCABULARY)
            row = answer.rows[t : t + 1]
            got[row.token_ids] = np.exp(row.logprobs.astype(np.float64))
            law = reference(logits, spec)
            recorded = got > 0 if spec.capture == "head" else np.ones(VOCABULARY, bool)
            assert ((got > 0) == (law > 0))[recorded].all()
            assert np.abs(got - law)[recorded].sum() < 2e-5
            assert np.abs(got - probs)[recorded].max() < 1e-6
            compared += 1
    assert compared > 20


def seen(steps: Path, answer: Answer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Logits and the law drawn from, of each committed token of an answer, in order."""
    t = 0
    for path in sorted(steps.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            metadata = file.metadata()
        rids = json.loads(metadata["rids"])
        if answer.meta["id"] not in rids:
            continue
        index, found = rids.index(answer.meta["id"]), load_file(path)
        if metadata["kind"] != "verify":
            assert metadata["kind"] == "prefill" and found["tokens"][index] == answer.ids[t]
            yield found["logits"][index], found["probs"][index]
            t += 1
            continue
        block = found["candidates"].shape[1]
        for j in range(min(found["accepted"][index] + 1, len(answer.ids) - t)):
            if j < found["accepted"][index]:
                assert found["candidates"][index, j + 1] == answer.ids[t]
            yield found["logits"][index * block + j], found["probs"][index, j]
            t += 1
        if t == len(answer.ids):
            return


def reference(logits: np.ndarray, spec: SamplingSpec) -> np.ndarray:
    """The law in float64, written from its definition: top-k first, then top-p on what is left, ties kept."""
    z = logits.astype(np.float64)
    probs = np.exp((z - z.max()) / spec.temperature)
    if spec.top_k:
        probs[z < np.sort(z)[-spec.top_k]] = 0
    probs /= probs.sum()
    if spec.top_p < 1:
        mass_above = np.array([probs[z > value].sum() for value in z])
        probs[mass_above >= spec.top_p] = 0
    return probs / probs.sum()
