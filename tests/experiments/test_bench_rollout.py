"""The rollout bench on a short workload: what it times is the real thing, and both sides do the same work."""

from __future__ import annotations

import pytest

from experiments.bench.rollout import ARMS, CAPTURES, PLAIN, capture_loss, load_engines, measure, requests
from miles_ext.capability import ArmKind
from rollout.embedded.engine import EmbeddedEngine


@pytest.fixture(scope="module")
def engines() -> dict[ArmKind, EmbeddedEngine]:
    return load_engines("cpu")


def test_every_arm_and_capture_is_run_and_the_shipped_draft_pays(engines: dict[ArmKind, EmbeddedEngine]) -> None:
    specs = [PLAIN, *(on for on, _ in CAPTURES.values())]
    runs = measure(engines, specs, repeats=2, length=48)
    assert {(run.arm, run.spec, run.repeat) for run in runs} == {
        (arm, spec, i) for arm in ARMS for spec in specs for i in range(2)
    }
    assert len(runs) == 24 and all(run.tokens_per_s > 0 for run in runs)
    assert all(run.accept_length == 1 for run in runs if run.arm == "regular")
    assert all(run.accept_length > 3 for run in runs if run.arm != "regular")


def test_both_sides_of_a_capture_loss_decode_the_same(engines: dict[ArmKind, EmbeddedEngine]) -> None:
    twins = load_engines("cpu")
    for arm in ARMS:
        assert -1 < capture_loss((engines[arm], twins[arm]), *CAPTURES["k32"], repeat=0, length=24) < 1
    with pytest.raises(RuntimeError, match="changed a response"):
        capture_loss((engines["regular"], twins["dflash2"]), *CAPTURES["k32"], repeat=0, length=60)


def test_repeats_differ_and_arms_share_prompts_and_seeds() -> None:
    first, second = requests(PLAIN, 0), requests(PLAIN, 1)
    assert [one.prompt_ids.tolist() for one in first] != [one.prompt_ids.tolist() for one in second]
    assert not {one.spec.seed for one in first} & {one.spec.seed for one in second}
