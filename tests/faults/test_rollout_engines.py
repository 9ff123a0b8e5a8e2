"""Engines that die, hang or answer wrongly: every prompt is answered once as if nothing had been, or named as lost.

One pool of two workers serves them all: what a fault leaves behind would show in the next test.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miles_ext.errors import EngineError, RequestError, WeightError
from rollout.embedded.engine import EmbeddedEngine
from rollout.pool import RolloutPool
from tests.faults.engines import answers, at_start, gone, inject, pool_of, versions, weights
from tests.rollout.tiny import requests, write_draft, write_target

pytestmark = [pytest.mark.ray, pytest.mark.faults]
ASKED = requests(12, max_new_tokens=24)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def draft(target: Path) -> Path:
    return write_draft(target.with_name("draft"), target)


@pytest.fixture(scope="module")
def shared(ray_cluster: None, target: Path, draft: Path) -> Iterator[RolloutPool]:
    with pool_of(target, draft) as pool:
        pool.update_weights(*weights(target, 1))
        yield pool


@pytest.fixture(scope="module")
def undisturbed(target: Path, draft: Path) -> list[tuple[str, list[int]]]:
    engine = EmbeddedEngine(target, draft, "dflash2", context_length=64, max_concurrency=8)
    return answers(engine.generate(ASKED))


@pytest.fixture
def pool(shared: RolloutPool, target: Path) -> Iterator[RolloutPool]:
    yield shared
    gone(target, left=2)
    reports = shared.capability()
    assert len({(one.weight_version, one.resident_digest, one.draft_digest) for one in reports}) == 1


def current(pool: RolloutPool) -> int:
    return pool.capability()[0].weight_version


@pytest.mark.parametrize(
    ("fault", "workers"),
    [("die", [1]), ("die", [0, 1]), ("hang", [0]), ("freeze", [1])],
    ids=["killed", "both killed", "hung with a beating heart", "frozen"],
)
def test_an_engine_lost_in_the_middle_of_a_batch(
    pool: RolloutPool, undisturbed: Any, fault: str, workers: list[int]
) -> None:
    before, version = pool.restarts, current(pool)
    inject(pool, fault, *workers)
    found = pool.generate(ASKED)
    assert answers(found) == undisturbed and versions(found) == {version}
    assert pool.restarts - before >= len(workers)


@pytest.mark.parametrize("fault", ["twice", "wrong name", "stale", "other draft"])
def test_an_answer_that_was_not_asked_for_counts_for_nothing(
    pool: RolloutPool, undisturbed: Any, fault: str, capfd: pytest.CaptureFixture[str]
) -> None:
    before = pool.restarts
    inject(pool, fault, 0)
    assert answers(pool.generate(ASKED)) == undisturbed
    assert pool.restarts - before >= 1
    reasons = {
        "twice": "twice \\['0'\\]", "wrong name": "lost \\['0'\\]", "stale": "from weight versions",
        "other draft": "draft 0000",
    }  # fmt: skip
    assert re.search(reasons[fault], capfd.readouterr().err)


def test_killed_during_a_handoff(pool: RolloutPool, target: Path, undisturbed: Any) -> None:
    version = current(pool) + 1
    inject(pool, "die in a handoff", 1)
    reports = pool.update_weights(*weights(target, version))
    assert [report.version for report in reports] == [version] * 2 and len({r.resident_digest for r in reports}) == 1
    found = pool.generate(ASKED)
    assert answers(found) == undisturbed and versions(found) == {version}


def test_hung_during_a_handoff(pool: RolloutPool, target: Path) -> None:
    version = current(pool) + 1
    inject(pool, "hang in a handoff", 0)
    assert [report.version for report in pool.update_weights(*weights(target, version))] == [version] * 2


def test_two_handoffs_at_once_are_taken_in_turn(pool: RolloutPool, target: Path) -> None:
    version = current(pool) + 1
    outcomes: list[str] = []

    def hand_over() -> None:
        try:
            pool.update_weights(*weights(target, version))
            outcomes.append("taken")
        except WeightError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=hand_over) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken, refused = sorted(outcomes, key=len)
    assert taken == "taken" and f"version {version} does not rise above {version}" in refused
    assert current(pool) == version


def test_draft_bytes_of_one_engine_changed(pool: RolloutPool, target: Path) -> None:
    before, version = pool.restarts, current(pool) + 1
    inject(pool, "flip a draft bit", 1)
    reports = pool.update_weights(*weights(target, version))
    assert len({report.draft_digest for report in reports}) == 1 and {r.version for r in reports} == {version}
    assert pool.restarts - before >= 1


def test_target_digest_of_one_engine_differs(pool: RolloutPool, target: Path, undisturbed: Any) -> None:
    before, version = pool.restarts, current(pool) + 1
    inject(pool, "other bytes", 1)
    reports = pool.update_weights(*weights(target, version))
    assert len({report.resident_digest for report in reports}) == 1
    assert answers(pool.generate(ASKED)) == undisturbed and pool.restarts - before >= 1


@pytest.mark.parametrize("fault", ["no start", "sick"])
def test_a_replacement_fails_too(pool: RolloutPool, target: Path, undisturbed: Any, fault: str) -> None:
    before = pool.restarts
    at_start(target, 1, fault)
    inject(pool, "die", 1)
    assert answers(pool.generate(ASKED)) == undisturbed
    assert pool.restarts - before >= 2


def test_a_batch_that_was_given_up_leaves_nothing_in_the_next(pool: RolloutPool, undisturbed: Any) -> None:
    bad = requests(12)
    object.__setattr__(bad[0], "max_new_tokens", 0)
    with pytest.raises(RequestError, match="max_new_tokens is 0"):
        pool.generate(bad)
    with pytest.raises(RequestError, match=r"\['3'\] occur twice"):
        pool.generate([*ASKED, ASKED[3]])
    assert answers(pool.generate(ASKED)) == undisturbed


def test_two_callers_at_once_get_their_own(pool: RolloutPool, undisturbed: Any) -> None:
    inject(pool, "die", 0)
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda part=part: found.__setitem__(part, answers(pool.generate(ASKED[part::2]))))
        for part in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == undisturbed[::2] and found[1] == undisturbed[1::2]


def test_a_pool_closed_by_another_thread_starts_nothing_anew(ray_cluster: None, target: Path, undisturbed: Any) -> None:
    with pool_of(target, None, workers=1, request_timeout_s=600.0) as pool:
        inject(pool, "hang", 0)
        threading.Timer(1.0, pool.close).start()
        with pytest.raises(EngineError, match="closed.*unanswered: 12 of 12"):
            pool.generate(ASKED)
        for call in (lambda: pool.generate(ASKED), pool.capability):
            with pytest.raises(EngineError, match="the pool is closed"):
                call()
        assert pool.restarts == 0
