"""What must hold of a worker's answers and handoffs before anything is made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from miles_ext.errors import EngineError, RequestError, WeightError
from miles_ext.records import Completion
from miles_ext.weights import HandoffReport, WeightManifest, spell
from rollout.engine import Request


def require_distinct(requests: Sequence[Request]) -> None:
    """Raise RequestError where two requests of one batch have one id: an answer could not be told from the other's."""
    ids = [request.request_id for request in requests]
    twice = sorted({name for name in ids if ids.count(name) > 1}) if len(set(ids)) < len(ids) else []
    if twice:
        raise RequestError(f"request ids {twice[:5]} occur twice in one batch; accepted: each once")


def require_answers(
    worker: str, requests: Sequence[Request], completions: Sequence[Completion], versions: range, draft: str
) -> None:
    """Raise EngineError unless there is one answer a request, in order, from the weights and the draft that serve.

    versions: that served while the requests were in flight; empty where no weights were handed over yet.
    draft: the digest that the draft was loaded with.
    """
    asked, answered = [one.request_id for one in requests], [one.request_id for one in completions]
    if asked != answered:
        lost = [name for name in asked if name not in answered]
        extra = [name for name in answered if name not in asked]
        twice = sorted({name for name in answered if answered.count(name) > 1})
        raise EngineError(
            f"{worker} answered {len(answered)} of {len(asked)} requests: lost {lost[:5]}, twice {twice[:5]}, never "
            f"asked {extra[:5]}, else out of order; accepted: one answer a request, in order"
        )
    for request, one in zip(requests, completions, strict=True):
        if list(request.prompt_ids) != list(one.prompt_ids):
            raise EngineError(f"{worker} answered request {request.request_id} for another prompt")
        served = set(one.weight_version.tolist())
        if len(versions) and not served <= set(versions):
            raise EngineError(
                f"{worker} answered request {request.request_id} from weight versions {sorted(served)}; accepted: "
                f"{versions.start} to {versions.stop - 1}, which served when it was asked"
            )
        if one.draft_digest != draft:
            raise EngineError(
                f"{worker} answered request {request.request_id} with the draft {one.draft_digest}; accepted: {draft}, "
                "as it was loaded"
            )


def dissenters(reports: Mapping[int, HandoffReport]) -> dict[int, WeightError]:
    """Workers whose resident digest is not that of most of their replicas; all of them where no digest has most."""
    digests = {worker: report.resident_digest for worker, report in reports.items()}
    common, count = Counter(digests.values()).most_common(1)[0]
    trusted = common if 2 * count > len(digests) else ""
    return {
        worker: WeightError(
            f"resident digest {digest}; accepted: the same on every worker, found {sorted(digests.values())}"
        )
        for worker, digest in digests.items()
        if digest != trusted
    }


def require_handoff(worker: str, report: HandoffReport, manifest: WeightManifest, resident: str, draft: str) -> None:
    """Raise WeightError unless an engine loaded what was sent, as its replicas did, beside an untouched draft.

    resident: the digest of the replicas; empty where this report is the first.
    """
    wanted = (manifest.version, manifest.digest, resident or report.resident_digest, draft, spell(manifest.transform))
    found = (
        report.version, report.received_digest, report.resident_digest, report.draft_digest, spell(report.transform),
    )  # fmt: skip
    if found != wanted:
        raise WeightError(
            f"{worker} reports version, received, resident and draft digests and transform {found}; "
            f"accepted: {wanted}, as sent, as its replicas have and as its draft was loaded; restart the run"
        )
