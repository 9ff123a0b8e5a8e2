"""What to do about a rollout worker: a pure function of what was observed. No Ray, no clock and no state in here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Doing = Literal["idle", "start", "feed", "probe", "generate", "report"]
"""The call a worker is in. `start` loads the engine, `feed` hands it weights, `probe` has it decode a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The budgets and the patience of a run; `RolloutConfig` describes each. Times in seconds."""

    max_restarts: int
    max_failures: int
    backoff_s: float
    backoff_max_s: float
    heartbeat_timeout_s: float
    request_timeout_s: float
    start_timeout_s: float
    probe_timeout_s: float
    first_probe_grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One worker at one moment.

    fresh: its engine has not decoded since it was started. served: some engine in its place has decoded in this run.
    failure: how its call or its process ended, empty while neither did.
    silent_s: since its process last answered a heartbeat. stuck_s: since its call began or its work last moved on.
    failures: of this worker since its last answer, run_failures: of all workers since the run began; without this one.
    """

    doing: Doing
    fresh: bool = False
    served: bool = True
    failure: str = ""
    silent_s: float = 0.0
    stuck_s: float = 0.0
    failures: int = 0
    run_failures: int = 0


@dataclass(frozen=True, slots=True)
class Continue:
    """Leave the worker alone."""


@dataclass(frozen=True, slots=True)
class Restart:
    """End it, and start another in its place after `delay_s`."""

    reason: str
    delay_s: float


@dataclass(frozen=True, slots=True)
class Stop:
    """End the run: another restart would change nothing."""

    reason: str


def decide(seen: Observation, limits: Limits) -> Continue | Restart | Stop:
    """Continue while nothing is wrong; restart within both budgets; else stop.

    The first engine of a place is not replaced while it starts: what keeps it down is its set-up, not bad luck. The
    first restart comes at once, the next ones after backoff_s, doubled each time up to backoff_max_s.
    """
    reason = trouble(seen, limits)
    if not reason:
        return Continue()
    failures, run_failures = seen.failures + 1, seen.run_failures + 1
    if not seen.served and seen.doing == "start":
        return Stop(f"did not start: {reason}; mend what its log names")
    if failures > limits.max_restarts:
        return Stop(
            f"failed {failures} times in a row, last: {reason}; accepted: rollout.max_restarts = "
            f"{limits.max_restarts}; look at the worker's log or raise it"
        )
    if run_failures > limits.max_failures:
        return Stop(
            f"had failure {run_failures} of the run, last: {reason}; accepted: rollout.max_failures = "
            f"{limits.max_failures}; look at the logs of the workers or raise it"
        )
    doublings = min(failures - 2, 32)  # beyond that the cap holds anyway
    delay_s = 0.0 if failures == 1 else min(limits.backoff_s * 2.0**doublings, limits.backoff_max_s)
    return Restart(reason, delay_s)


def trouble(seen: Observation, limits: Limits) -> str:
    """What is wrong with the worker, in words; empty where nothing is."""
    if seen.failure or seen.doing == "idle":
        return seen.failure
    patience_s = _patience_s(seen, limits)
    # An engine that loads or compiles may hold its process for minutes: then only the patience for that call counts.
    heartbeat_s = patience_s if seen.doing == "start" or seen.fresh else limits.heartbeat_timeout_s
    if seen.silent_s > heartbeat_s:
        return f"no heartbeat for {seen.silent_s:.0f} s in {seen.doing}; accepted: {heartbeat_s:g} s"
    if seen.stuck_s > patience_s:
        return f"no progress for {seen.stuck_s:.0f} s in {seen.doing}; accepted: {patience_s:g} s"
    return ""


def _patience_s(seen: Observation, limits: Limits) -> float:
    if seen.doing == "start":
        return limits.start_timeout_s
    if seen.doing == "probe":
        return limits.first_probe_grace_s if seen.fresh else limits.probe_timeout_s
    return limits.request_timeout_s
