"""What deserves a look while a run goes on: each alarm is a metric of every step, and is said when it begins."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from experiments.config import AlarmConfig

NAMESPACE = "alarm/"
# Word on the console -> where to look.
ADVICE = {
    "reward": "the policy may have collapsed: see train/entropy, sc/correction_norm and trainer.lr",
    "accept_length": "the draft no longer fits: see handoff/draft_unchanged and how far the target has moved",
    "logprob_gap": "trainer and engine disagree: run audit --zero-lr to tell a broken scorer from stale weights",
    "entropy": "see trainer.lr and sampling.temperature",
    "untrainable": "see rollout/overflow and sampling.max_support",
    "non_finite": "updates were left out: look at the rollout of the step and lower trainer.lr",
}


class Alarms:
    """Judges one arm step by step.

    history: its metrics so far, by name and step, so that a continued run judges as one that never stopped.
    """

    def __init__(
        self, config: AlarmConfig, groups: int, name: str, say: Callable[[str], None],
        history: Mapping[str, Mapping[int, float]],
    ) -> None:  # fmt: skip
        self._config, self._groups, self._name, self._say = config, groups, name, say
        self._seen: defaultdict[str, list[float]] = defaultdict(list)
        for metric, points in history.items():
            self._seen[metric] = [points[step] for step in sorted(points)]

    @property
    def skipped(self) -> int:
        """Updates left out so far."""
        return int(sum(self._seen["train/skipped_updates"]))

    def judge(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """alarm/NAME of one step: 1.0 where it rings; a metric that is not a number rings."""
        for metric, value in metrics.items():
            self._seen[metric].append(value)
        rings = {}
        for word, reason in self._reasons().items():
            before = self._seen[NAMESPACE + word]
            if reason and not any(before[-1:]):
                self._say(f"ALARM {self._name} {word}: {reason}; {ADVICE[word]}")
            rings[NAMESPACE + word] = float(bool(reason))
            before.append(float(bool(reason)))
        return rings

    def _reasons(self) -> dict[str, str]:
        """Why each alarm rings, "" where it does not."""
        limits, seen = self._config, self._seen
        gap, entropy = (seen[name][-1:] for name in ("train/train_rollout_logprob_abs_diff", "train/entropy"))
        untrainable, steps = sum(seen["rollout/untrainable_groups"]), len(seen["rollout/untrainable_groups"])
        skipped = seen["train/skipped_updates"][-1:]
        inside = [limits.entropy_low <= value <= limits.entropy_high for value in entropy]
        too_many = untrainable > limits.untrainable * steps * self._groups
        return {
            "reward": self._fallen("rollout/raw_reward", limits.reward_drop),
            "accept_length": self._fallen("spec/accept_length", limits.accept_drop),
            "logprob_gap": f"{gap[0]:.3g} nats" if gap and not gap[0] <= limits.logprob_gap else "",
            "entropy": f"{entropy[0]:.3g} nats" if inside and not inside[0] else "",
            "untrainable": f"{untrainable:.0f} groups untrainable so far" if too_many else "",
            "non_finite": f"{skipped[0]:.0f} updates were not finite" if skipped and skipped[0] else "",
        }

    def _fallen(self, metric: str, part: float) -> str:
        """Whether the mean of the last window lies below the best window's by more than `part` of it."""
        values, window = self._seen[metric], self._config.window
        if not part or len(values) < 2 * window:
            return ""
        means = [sum(values[end - window : end]) / window for end in range(window, len(values) + 1)]
        best, now = max(means), means[-1]
        return "" if now >= best - part * abs(best) else f"{now:.3g} over the last {window} steps, {best:.3g} at best"


def alarms_in(series: Mapping[str, Mapping[int, float]]) -> dict[str, list[int]]:
    """The steps at which each alarm rang, of the metrics of an arm; alarms that never rang are left out."""
    rang = {
        name.removeprefix(NAMESPACE): sorted(step for step, value in points.items() if value)
        for name, points in series.items() if name.startswith(NAMESPACE)
    }  # fmt: skip
    return {word: steps for word, steps in rang.items() if steps}
