"""All-or-nothing replacement of the target's weights. The draft's private bytes are proved untouched."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

import torch

from miles_ext.errors import WeightError
from miles_ext.tensors import digest, dtype_name, entries, from_array
from miles_ext.weights import HandoffReport, WeightManifest
from rollout.embedded import transform
from rollout.embedded.decoder import Decoder
from rollout.embedded.draft import Draft
from rollout.engine import Bucket


def draft_digest(draft: Draft | None) -> str:
    """Digest over every private byte; empty without a draft."""
    return digest(draft.private_tensors()) if draft else ""


def replace_weights(
    target: Decoder, draft: Draft | None, manifest: WeightManifest, buckets: Iterable[Bucket], trusted_draft: str
) -> HandoffReport:
    """Stage, verify, apply to the target in place, and verify again; WeightError leaves everything as it was.

    A transform that the manifest declares is applied to what was verified, just before the target takes it.
    trusted_draft: the digest that the draft must have, before and after.
    """
    start = time.perf_counter()
    _require_fit(target, manifest)
    staged = _stage(manifest, buckets)
    received = entries(staged)
    manifest.require_received(received)
    _require_draft(draft, trusted_draft, "before the update")
    resident = target.resident_tensors()
    backup = {name: tensor.clone() for name, tensor in resident.items()}
    try:
        target.load_hf_tensors(transform.apply(staged, manifest.transform))
        resident_digest = digest(resident)
        _require_draft(draft, trusted_draft, "by the update")
    except BaseException:
        for name, tensor in backup.items():
            resident[name].copy_(tensor)
        raise
    return HandoffReport(
        version=manifest.version,
        received_digest=replace(manifest, tensors=received).digest,
        resident_digest=resident_digest,
        draft_digest=trusted_draft,
        seconds=time.perf_counter() - start,
        transform=dict(manifest.transform),
    )


def _require_fit(target: Decoder, manifest: WeightManifest) -> None:
    transform.check(manifest.transform)
    expected = {name: (tuple(view.shape), dtype_name(view.dtype)) for name, view in target.named_hf_tensors()}
    offered = {name: (entry.shape, entry.dtype) for name, entry in manifest.tensors.items()}
    wrong = {name: offered.get(name, "missing") for name in expected if offered.get(name) != expected[name]}
    extra = sorted(offered.keys() - expected.keys())
    if wrong or extra:
        first = next(iter(wrong), None)
        raise WeightError(
            f"version {manifest.version} does not fit the loaded target: {len(wrong)} tensors differ or are missing"
            + (f" (first {first}: {wrong[first]}, the target has {expected[first]})" if first else "")
            + f", unexpected {extra}; export the same architecture in the engine's dtype, tied heads once"
        )


def _stage(manifest: WeightManifest, buckets: Iterable[Bucket]) -> dict[str, torch.Tensor]:
    staged: dict[str, torch.Tensor] = {}
    for bucket in buckets:
        for name, array in bucket.items():
            if name in staged:
                raise WeightError(f"{name} arrived twice for version {manifest.version}; send every tensor once")
            if name not in manifest.tensors:
                raise WeightError(
                    f"{name} arrived but is not listed by version {manifest.version}; nothing was applied"
                )
            staged[name] = from_array(array, manifest.tensors[name].dtype, lend=True)
    return staged


def _require_draft(draft: Draft | None, trusted: str, when: str) -> None:
    found = draft_digest(draft)
    if found != trusted:
        raise WeightError(
            f"the draft's private bytes changed {when}: digest {found}, at load {trusted}; "
            "the old target weights serve on, restart this worker"
        )
