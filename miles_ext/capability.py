"""What a loaded engine says of itself, and the check that it is enough. Absence of proof is failure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from miles_ext.errors import CapabilityError
from miles_ext.sampling import FilterOrder, SamplingSpec

ArmKind = Literal["regular", "dflash", "dflash2"]
Verifier = Literal["none", "target_only", "chain"]
VERIFIER_OF: dict[ArmKind, Verifier] = {"regular": "none", "dflash": "target_only", "dflash2": "chain"}
UNFILTERED_PATCHES = frozenset({"strict_refusal"})
FILTERED_PATCHES = UNFILTERED_PATCHES | {"one_law", "cutoff_ties", "overflow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapability:
    """Report of one rank of one worker, computed from what it loaded; read again after every restart.

    verifier_impl: `production` or `test`; test implementations are refused outside tests.
    dflash_sampling_verify_available: whether sampled requests are verified by rejection, not by greedy comparison.
    patches: features in force (`strict_refusal`, `one_law`, `cutoff_ties`, `overflow`).
    environment: switches found that would break exactness.
    """

    engine: str
    engine_version: str
    arm: ArmKind
    verifier: Verifier
    verifier_impl: Literal["production", "test"] = "production"
    dflash_sampling_verify_available: bool = False
    accept_threshold_single: float = 1.0
    accept_threshold_acc: float = 1.0
    filter_orders: tuple[FilterOrder, ...] = ()
    max_support: int = 0
    plugin_version: str = ""
    patches: frozenset[str] = frozenset()
    environment: tuple[str, ...] = ()
    vocab_size: int = 0
    weight_version: int = -1
    resident_digest: str = ""
    draft_digest: str = ""
    engine_id: str = ""
    rank: int = 0
    extra: dict[str, str] = field(default_factory=dict)


def require(
    capability: EngineCapability, spec: SamplingSpec, arm: ArmKind, *, allow_test_verifier: bool = False
) -> None:
    """Raise CapabilityError listing everything about `capability` that does not fit `spec` in `arm`."""
    if arm not in get_args(ArmKind):
        raise CapabilityError(f"arm is {arm!r}; accepted: {', '.join(get_args(ArmKind))}")
    wrong: list[str] = []

    def expect(holds: bool, complaint: str) -> None:
        if not holds:
            wrong.append(complaint)

    expect(capability.arm == arm, f"loaded arm is {capability.arm!r}, wanted {arm!r}")
    wanted = VERIFIER_OF[arm]
    expect(capability.verifier == wanted, f"verifier is {capability.verifier!r}, arm {arm!r} needs {wanted!r}")
    if arm != "regular":
        expect(capability.dflash_sampling_verify_available, "sampled verification is unavailable (greedy fallback)")
        expect(bool(capability.draft_digest), "no digest of the private draft weights")
        production = capability.verifier_impl == "production"
        expect(production or allow_test_verifier, f"verifier implementation is {capability.verifier_impl!r}")
    for name in ("accept_threshold_single", "accept_threshold_acc"):
        value = getattr(capability, name)
        expect(value == 1.0, f"{name} is {value}, only 1.0 keeps the law")
    expect(not capability.environment, f"switches in force that break exactness: {list(capability.environment)}")
    if spec.capture != "off":
        needed = FILTERED_PATCHES if spec.is_filtered else UNFILTERED_PATCHES
        missing = sorted(needed - capability.patches)
        expect(not missing, f"patches not in force: {missing}")
    if spec.is_filtered:
        orders = capability.filter_orders
        expect(spec.filter_order in orders, f"filter order {spec.filter_order!r} is not among {list(orders)}")
    if spec.capture != "off":
        name = "max_support" if spec.capture == "complete" else "head_size"
        size, cap = getattr(spec, name), capability.max_support
        expect(size <= cap, f"{name} {size} exceeds the engine's {cap}")
    try:
        spec.require_vocabulary(capability.vocab_size)
    except ValueError as error:
        wrong.append(str(error))
    if wrong:
        raise CapabilityError(
            f"engine {capability.engine_id or capability.engine} rank {capability.rank} cannot prove arm {arm!r}: "
            + "; ".join(wrong)
        )
