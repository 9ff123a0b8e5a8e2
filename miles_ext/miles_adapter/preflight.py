"""Before each rollout: every engine proves what it loaded, and that it is what the arguments asked for."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miles_ext.capability import EngineCapability, require
from miles_ext.errors import CapabilityError
from miles_ext.miles_adapter.arguments import Settings
from miles_ext.sampling import SamplingSpec
from miles_ext.sglang_plugin.report import STATE_KEY, from_json

# Arguments of sglang that decide the law or how it is verified. Miles drops those that the installed sglang does not
# know with a log line only, so what the server says of itself is compared with what was asked.
ASKED = (
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_num_draft_tokens",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_accept_threshold_single",
    "speculative_accept_threshold_acc",
    "sampling_mask_max_tokens",
    "enable_deterministic_inference",
)


@dataclass(frozen=True)
class Proof:
    """vocab_size: of every engine's law. drafts: digest of each rank's private draft, the same in every engine."""

    vocab_size: int
    drafts: Mapping[int, str]


def prove(
    servers: Mapping[str, Mapping[str, Any]], args: Namespace, settings: Settings, spec: SamplingSpec
) -> Proof:
    """servers: `/server_info` of every engine by its address. Raises CapabilityError listing what is not proved."""
    if not servers:
        raise CapabilityError("the router knows no engine; wait until the engines have registered")
    reports: dict[str, list[EngineCapability]] = {}
    wrong: list[str] = []
    for url, info in servers.items():
        reports[url] = read_reports(url, info)
        wrong += unlike(url, info, args)
        for one in reports[url]:
            wrong += shortcomings(url, one, settings, spec)
    every = [one for ranks in reports.values() for one in ranks]
    wrong += disagreements(every)
    if wrong:
        raise CapabilityError("; ".join(wrong))
    return Proof(every[0].vocab_size, {one.rank: one.draft_digest for one in every})


def read_reports(url: str, info: Mapping[str, Any]) -> list[EngineCapability]:
    """The capability of every rank behind one address."""
    states = info.get("internal_states") or [{}]
    ranks = [rank for state in states for rank in (state.get(STATE_KEY) or {}).get("ranks") or ()]
    if not ranks:
        raise CapabilityError(
            f"the engine at {url} reports no capability: the plugin is not loaded there; install this repository in "
            "the engines' environment (sglang 0.5.23) and see their log"
        )
    try:
        return [from_json(rank) for rank in ranks]
    except (TypeError, KeyError) as error:
        raise CapabilityError(
            f"the engine at {url} reports its capability in another form ({error}); install the same revision of this "
            "repository on both sides"
        ) from error


def shortcomings(url: str, capability: EngineCapability, settings: Settings, spec: SamplingSpec) -> list[str]:
    wrong = []
    try:
        require(capability, spec, settings.arm)
    except CapabilityError as error:
        wrong.append(f"{url}: {error}")
    if settings.arm != "regular" and "target_only_weights" not in capability.patches:
        wrong.append(f"{url}: the patch target_only_weights is not in force, so updates may reach the private draft")
    return wrong


def unlike(url: str, info: Mapping[str, Any], args: Namespace) -> list[str]:
    """Where the server runs with something else than `--sglang-...` asked for."""
    wrong = []
    for name in ASKED:
        asked = getattr(args, f"sglang_{name}", None)
        unasked = asked is None or (asked is False and name not in info)
        if not unasked and info.get(name) != asked:
            served = repr(info[name]) if name in info else "unknown to it"
            wrong.append(f"{url}: --sglang-{name.replace('_', '-')} {asked!r} was asked for, served is {served}")
    return wrong


def disagreements(every: list[EngineCapability]) -> list[str]:
    """Engines between which a request's law would depend on where it is routed."""
    wrong = []
    versions = sorted({one.weight_version for one in every})
    if len(versions) > 1:
        wrong.append(f"the engines serve weight versions {versions}; accepted: one")
    vocabularies = sorted({one.vocab_size for one in every})
    if len(vocabularies) > 1:
        wrong.append(f"the engines have vocabularies of {vocabularies}; accepted: one")
    for rank in sorted({one.rank for one in every}):
        for name in ("resident_digest", "draft_digest"):
            digests = sorted({getattr(one, name) for one in every if one.rank == rank})
            if len(digests) > 1:
                wrong.append(f"rank {rank} of the engines differs in {name}: {digests}")
    return wrong


def require_same_draft(before: Proof | None, now: Proof) -> None:
    """Raise CapabilityError where the private draft is no longer what the first rollout found."""
    if before is not None and before.drafts != now.drafts:
        raise CapabilityError(
            f"the private draft changed: digests {dict(before.drafts)} before the first rollout, {dict(now.drafts)} "
            "now; a weight update reached it, restart the engines"
        )
