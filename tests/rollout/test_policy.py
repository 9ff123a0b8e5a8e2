"""Decisions of the control loop as a table, and what must hold of all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.policy import Continue, Doing, Limits, Observation, Restart, Stop, decide

LIMITS = Limits(
    max_restarts=3, max_failures=6, backoff_s=1.0, backoff_max_s=5.0, heartbeat_timeout_s=10.0, request_timeout_s=100.0,
    start_timeout_s=1000.0, probe_timeout_s=20.0, first_probe_grace_s=300.0,
)  # fmt: skip
DOING: tuple[Doing, ...] = ("idle", "start", "feed", "probe", "generate", "report")


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        (Observation(doing="generate", silent_s=9.9, stuck_s=99.9), "continue"),
        (Observation(doing="idle", silent_s=1e6, stuck_s=1e6), "continue"),
        (Observation(doing="generate", silent_s=10.1), "no heartbeat for 10 s in generate; accepted: 10 s"),
        (Observation(doing="feed", silent_s=10.1), "no heartbeat"),
        (Observation(doing="generate", stuck_s=100.1), "no progress for 100 s in generate; accepted: 100 s"),
        (Observation(doing="feed", stuck_s=100.1), "no progress"),
        (Observation(doing="probe", stuck_s=20.1), "no progress for 20 s in probe; accepted: 20 s"),
        (Observation(doing="probe", silent_s=19.9, stuck_s=19.9), "no heartbeat"),
        (Observation(doing="probe", fresh=True, silent_s=299.0, stuck_s=299.0), "continue"),
        (Observation(doing="probe", fresh=True, stuck_s=300.1), "no progress for 300 s in probe; accepted: 300 s"),
        (Observation(doing="start", fresh=True, silent_s=999.0, stuck_s=999.0), "continue"),
        (Observation(doing="start", fresh=True, stuck_s=1000.1), "no progress for 1000 s in start"),
        (Observation(doing="generate", failure="ActorDiedError"), "ActorDiedError"),
    ],
)
def test_what_is_seen_decides(seen: Observation, wanted: str) -> None:
    found = decide(seen, LIMITS)
    if wanted == "continue":
        assert found == Continue()
    else:
        assert isinstance(found, Restart) and found.reason.startswith(wanted) and found.delay_s == 0


def test_restarts_wait_twice_as_long_each_time_up_to_a_cap_and_end() -> None:
    patient = replace(LIMITS, max_restarts=5)
    found = [decide(Observation(doing="generate", failure="dead", failures=n), patient) for n in range(6)]
    assert [one.delay_s for one in found if isinstance(one, Restart)] == [0, 1, 2, 4, 5]
    assert found[5] == Stop(
        "failed 6 times in a row, last: dead; accepted: rollout.max_restarts = 5; look at the worker's log or raise it"
    )


def test_failures_of_all_workers_together_end_the_run() -> None:
    assert isinstance(decide(Observation(doing="generate", failure="dead", run_failures=5), LIMITS), Restart)
    found = decide(Observation(doing="generate", failure="dead", run_failures=6), LIMITS)
    assert isinstance(found, Stop) and "had failure 7 of the run" in found.reason and "max_failures = 6" in found.reason


def test_an_engine_that_never_came_up_is_not_tried_again() -> None:
    seen = Observation(doing="start", failure="no such file", served=False)
    assert decide(seen, LIMITS) == Stop("did not start: no such file; mend what its log names")
    assert isinstance(decide(replace(seen, served=True), LIMITS), Restart)


seconds = st.floats(0, 1e9)
observations = st.builds(
    Observation, doing=st.sampled_from(DOING), fresh=st.booleans(), served=st.booleans(),
    failure=st.sampled_from(["", "dead"]), silent_s=seconds, stuck_s=seconds, failures=st.integers(0, 10**6),
    run_failures=st.integers(0, 10**6),
)  # fmt: skip


@given(observations)
def test_every_decision_keeps_the_budgets_and_more_trouble_never_helps(seen: Observation) -> None:
    found = decide(seen, LIMITS)
    if isinstance(found, Restart):
        assert seen.failures < LIMITS.max_restarts and seen.run_failures < LIMITS.max_failures
        assert found.reason and 0 <= found.delay_s <= LIMITS.backoff_max_s
    if seen.failure:
        assert not isinstance(found, Continue)
    worse = replace(seen, failures=seen.failures + 1, run_failures=seen.run_failures + 1, stuck_s=2 * seen.stuck_s)
    order = [Continue, Restart, Stop]
    assert order.index(type(decide(worse, LIMITS))) >= order.index(type(found))
