"""Weight versions, manifests and digests: the proof that what was sent is what was loaded. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from miles_ext.errors import WeightError


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """dtype: as torch spells it without its prefix (`float32`, `bfloat16`). digest: of the contiguous bytes."""

    shape: tuple[int, ...]
    dtype: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """What a handoff delivers: HF names (tied heads once), cast to the engine's dtype.

    version: monotone; sglang gets its decimal string.
    transform: a declared change (quantisation, noise), applied on the rollout side after the digest is verified.
    """

    version: int
    tensors: Mapping[str, TensorEntry]
    transform: Mapping[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """One digest over names, shapes, dtypes and contents, independent of order, and over the transform if any."""
        sent = combine(self.tensors)
        return xxhash.xxh3_128_hexdigest(f"{sent}\n{spell(self.transform)}".encode()) if self.transform else sent

    def require_received(self, received: Mapping[str, TensorEntry]) -> None:
        """Raise WeightError listing every tensor that is missing, unexpected or different."""
        missing, extra = sorted(self.tensors.keys() - received.keys()), sorted(received.keys() - self.tensors.keys())
        changed = sorted(name for name in self.tensors.keys() & received.keys() if self.tensors[name] != received[name])
        if missing or extra or changed:
            raise WeightError(
                f"version {self.version} did not arrive whole: missing {missing}, unexpected {extra}, different "
                f"{changed}; nothing was applied, send it again"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffReport:
    """What an engine proves after an update: see the design of `WeightManifest` and the three digests.

    received_digest: over the tensors as they were loaded and the transform, equal to the manifest's.
    resident_digest: over the engine's own (fused, sharded) tensors, equal across replicas.
    draft_digest: over every private byte of the draft, equal before and after; empty for an engine without a draft.
    seconds: wall time the engine was paused.
    transform: what was applied to the received tensors; empty for most engines, which refuse any.
    """

    version: int
    received_digest: str
    resident_digest: str
    draft_digest: str
    seconds: float
    transform: Mapping[str, Any] = field(default_factory=dict)


def spell(transform: Mapping[str, Any]) -> str:
    """A transform in one canonical line of JSON; `{}` for none."""
    return json.dumps(dict(transform), sort_keys=True)


def tensor_digest(data: Any) -> str:
    """XXH3-128 of a contiguous buffer (anything with the buffer protocol), 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def combine(tensors: Mapping[str, TensorEntry]) -> str:
    """XXH3-128 over sorted (name, dtype, shape, digest) lines."""
    lines = [f"{name}\t{t.dtype}\t{','.join(map(str, t.shape))}\t{t.digest}\n" for name, t in sorted(tensors.items())]
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())
