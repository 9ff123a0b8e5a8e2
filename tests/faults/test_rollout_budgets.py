"""What a run does when a fault does not go away: it waits as long as it was told, restarts as often, and then stops.

Each pool is new, of one worker, so that its budgets are its own.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from miles_ext.errors import CapabilityError, EngineError, WeightError
from tests.faults.engines import answers, at_start, inject, pool_of, versions, weights
from tests.rollout.tiny import requests, write_draft, write_target

pytestmark = [pytest.mark.ray, pytest.mark.faults]
ASKED = requests(4, max_new_tokens=24)


@pytest.fixture
def target(ray_cluster: None, tmp_path: Path) -> Path:
    return write_target(tmp_path / "target")


def test_the_budget_of_one_worker_is_used_up(target: Path) -> None:
    with pool_of(target, None, workers=1, max_restarts=2) as pool:
        inject(pool, "die", 0)
        at_start(target, 0, "always sick")
        with pytest.raises(EngineError, match="failed 3 times in a row.*max_restarts = 2.*unanswered: 4 of 4.*'0'"):
            pool.generate(ASKED)
        assert pool.restarts == 2


def test_the_budget_of_the_run_is_used_up_though_every_batch_was_answered(target: Path) -> None:
    with pool_of(target, None, workers=1, max_restarts=1, max_failures=1) as pool:
        inject(pool, "die", 0)
        assert len(pool.generate(ASKED)) == 4 and pool.restarts == 1
        inject(pool, "die", 0)
        with pytest.raises(EngineError, match="had failure 2 of the run.*max_failures = 1.*unanswered: 4 of 4"):
            pool.generate(ASKED)


def test_a_slow_start_within_its_patience_is_no_fault(target: Path) -> None:
    at_start(target, 0, "slow start")
    with pool_of(target, None, workers=1, heartbeat_timeout_s=2.0, request_timeout_s=2.0, probe_timeout_s=2.0) as pool:
        assert pool.restarts == 0


def test_a_start_beyond_its_patience_stops_the_run(target: Path) -> None:
    at_start(target, 0, "hung start")
    with pool_of(target, None, start=False, workers=1, start_timeout_s=3.0) as pool:
        with pytest.raises(EngineError, match="worker 0 did not start: no .* in start; accepted: 3 s"):
            pool.start()
        assert pool.restarts == 0


def test_a_probe_that_hangs_after_a_restart_is_given_its_grace_and_no_more(target: Path) -> None:
    with pool_of(target, None, workers=1, first_probe_grace_s=4.0) as pool:
        expected = answers(pool.generate(ASKED))
        inject(pool, "die", 0)
        at_start(target, 0, "hung probe")
        assert answers(pool.generate(ASKED)) == expected and pool.restarts >= 2


def test_an_idle_engine_that_decodes_no_more_is_found_before_it_is_asked(target: Path) -> None:
    with pool_of(target, None, workers=1, probe_interval_s=0.0) as pool:
        expected = answers(pool.generate(ASKED))
        inject(pool, "sick", 0)
        assert answers(pool.generate(ASKED)) == expected and pool.restarts == 1


def test_a_damaged_draft_of_every_engine_stops_the_handoff_and_the_old_version_serves(target: Path) -> None:
    with pool_of(target, write_draft(target.with_name("draft"), target), workers=1) as pool:
        pool.update_weights(*weights(target, 1))
        inject(pool, "flip a draft bit", 0)
        with pytest.raises(WeightError, match="the draft's private bytes changed before the update"):
            pool.update_weights(*weights(target, 2))
        assert versions(pool.generate(ASKED)) == {1} and pool.restarts == 0


def test_a_draft_changed_on_disk_is_refused_by_the_restarted_engine(target: Path) -> None:
    draft = write_draft(target.with_name("draft"), target)
    with pool_of(target, draft, workers=1) as pool:
        write_draft(draft, target, seed=5)
        inject(pool, "die", 0)
        with pytest.raises(CapabilityError, match="the draft's files changed"):
            pool.generate(ASKED)


def test_weights_lost_with_their_buckets_stop_the_run_by_name(target: Path) -> None:
    with pool_of(target, None, workers=1) as pool:
        manifest, buckets = weights(target, 1)
        damaged, _ = weights(target, 1, scale=1.5)
        with pytest.raises(WeightError, match="did not arrive whole.*different"):
            pool.update_weights(damaged, buckets)
        assert pool.update_weights(manifest, buckets)[0].version == 1


def test_second_restarts_wait(target: Path) -> None:
    with pool_of(target, None, workers=1, restart_backoff_s=1.5) as pool:
        inject(pool, "die", 0)
        at_start(target, 0, "no start")
        started = time.monotonic()
        assert len(pool.generate(ASKED)) == 4 and pool.restarts == 2
        assert time.monotonic() - started > 1.5
