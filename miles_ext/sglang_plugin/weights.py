"""Weight updates reach the target only, and prove what they did.

The digests live on sglang's weight manager: `received` of the last update, `resident` and `draft` as last computed.
A draft whose bytes differ from those it was loaded with fails the update that notices it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from miles_ext.sglang_plugin.digests import Ledger, draft_digest, resident_digest

SELECTOR_ADVICE = "the draft is private to this server and is never updated; use selector 'target'"


@dataclass
class Proof:
    """loaded_draft: the draft's digest when it was loaded. stale: `resident` and `draft` are older than the weights."""

    loaded_draft: str
    ledger: Ledger = field(default_factory=Ledger)
    resident: str = ""
    draft: str = ""
    stale: bool = True


_proofs: WeakKeyDictionary[Any, Proof] = WeakKeyDictionary()
_checking_weights = False


def proof_of(scheduler: Any) -> Proof:
    """The proof of this rank, made with the draft's digest the first time (at the end of the scheduler's start)."""
    if scheduler not in _proofs:
        _proofs[scheduler] = Proof(loaded_draft=_draft_digest(scheduler))
    return _proofs[scheduler]


def refreshed(scheduler: Any) -> Proof:
    """The proof with both digests of what resides now."""
    proof = proof_of(scheduler)
    if proof.stale:
        proof.resident = resident_digest(scheduler.tp_worker.model_runner.model)
        proof.draft = _draft_digest(scheduler)
        proof.stale = False
    return proof


def _draft_digest(scheduler: Any) -> str:
    worker = scheduler.draft_worker
    draft_model = getattr(worker, "draft_model", None)
    return "" if draft_model is None else draft_digest(draft_model, scheduler.tp_worker.model_runner.model)


# Hooks


def after_scheduler_init(_result: None, scheduler: Any, *_args: Any, **_rest: Any) -> None:
    proof_of(scheduler)


def around_select_runners(original: Callable[..., Any], manager: Any, selector: str = "all") -> Any:
    """`all` means the target: sglang's disk and IPC updates know no selector and would write over the draft."""
    if selector == "all" and not _checking_weights:
        selector = "target"
    return original(manager, selector)


def around_check_weights(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Checksums still cover both models."""
    global _checking_weights
    _checking_weights = True
    try:
        return original(manager, request)
    finally:
        _checking_weights = False


def around_begin(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqOutput

    if request.selector == "draft":
        return BeginWeightUpdateReqOutput(success=False, message=SELECTOR_ADVICE)
    output = original(manager, request)
    if output.success:
        proof_of(manager.scheduler).ledger = Ledger()
    return output


def around_end(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    return _prove(manager, original(manager, request))


def around_piece(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """One bucket between begin and end: tensor or distributed."""
    if getattr(request, "selector", "target") == "draft":
        return _refused(original, request)
    proof = proof_of(manager.scheduler)
    proof.stale = True
    with proof.ledger.recording(manager.tp_worker.model_runner.model):
        return original(manager, request)


def around_whole(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """An update that is whole in one call: disk or IPC."""
    proof = proof_of(manager.scheduler)
    proof.ledger = Ledger()
    with proof.ledger.recording(manager.tp_worker.model_runner.model):
        output = original(manager, request)
    if not output.success:
        proof.ledger, proof.stale = Ledger(), True
        return output
    return _prove(manager, output)


def after_resume_memory(_result: Any, manager: Any, _request: Any) -> None:
    proof_of(manager.scheduler).stale = True


def _prove(manager: Any, output: Any) -> Any:
    """Digest both models after an update; an update beside which the draft changed did not succeed."""
    proof = proof_of(manager.scheduler)
    proof.stale = True
    proof = refreshed(manager.scheduler)
    if proof.draft != proof.loaded_draft:
        output.success = False
        output.message = (
            f"the draft's bytes changed: digest {proof.draft}, loaded with {proof.loaded_draft}; restart this server"
        )
    return output


def _refused(original: Callable[..., Any], request: Any) -> Any:
    from sglang.srt.managers import io_struct

    output = {
        "UpdateWeightsFromTensorReqInput": io_struct.UpdateWeightsFromTensorReqOutput,
        "UpdateWeightsFromDistributedReqInput": io_struct.UpdateWeightsFromDistributedReqOutput,
    }[type(request).__name__]
    return output(success=False, message=SELECTOR_ADVICE)
