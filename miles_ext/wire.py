"""The packed wire: support rows and commit kinds as base64 of little-endian arrays (version 1)."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_ext.errors import SupportError
from miles_ext.records import Commit, SupportRows
from miles_ext.sampling import SamplingSpec

WIRE_VERSION = 1
_DTYPES = {"ids": "<i4", "logprobs": "<f4", "lengths": "<i4", "sampled": "<f4", "commit": "u1", "status": "u1"}


def request_fields(spec: SamplingSpec) -> dict[str, Any]:
    """The value of `sampling_params.custom_params.sc`: what the packed response shall hold and the request's seed."""
    k = spec.head_size if spec.capture == "head" else spec.max_support
    return {"v": WIRE_VERSION, "capture": spec.capture, "k": k, "order": spec.filter_order, "seed": spec.seed}


def pack(rows: SupportRows, commit: NDArray[np.uint8]) -> dict[str, Any]:
    """The value of `meta_info.sc`: at most 11 bytes an entry and 16 a token, plus a constant."""
    arrays = {
        "ids": rows.token_ids, "logprobs": rows.logprobs, "lengths": rows.lengths,
        "sampled": rows.sampled_logprobs, "commit": commit, "status": rows.status,
    }  # fmt: skip
    encoded = {name: base64.b64encode(array.astype(_DTYPES[name])).decode("ascii") for name, array in arrays.items()}
    return {"v": WIRE_VERSION, "kind": rows.kind, **encoded}


def unpack(message: Any) -> tuple[SupportRows, NDArray[np.uint8]]:
    """Inverse of `pack`. Raises SupportError for anything else: another version, a missing field, bytes that are no
    array, counts that do not add up, a commit kind that is none. What the rows say, `SupportRows.check` judges."""
    if not isinstance(message, dict):
        raise SupportError(f"packed wire is {type(message).__name__}; accepted: an object as `pack` makes it")
    if message.get("v") != WIRE_VERSION:
        raise SupportError(f"packed wire version {message.get('v')!r}; accepted: {WIRE_VERSION}; update the older side")
    if message.get("kind") not in ("complete", "head"):
        raise SupportError(f"packed wire kind is {message.get('kind')!r}; accepted: complete, head")
    arrays = {name: _decode(message, name, dtype) for name, dtype in _DTYPES.items()}
    _require_counts(arrays)
    rows = SupportRows(
        token_ids=arrays["ids"],
        logprobs=arrays["logprobs"],
        offsets=np.concatenate([[0], np.cumsum(arrays["lengths"], dtype=np.int64)]).astype(np.int64),
        sampled_logprobs=arrays["sampled"],
        kind=message["kind"],
        status=arrays["status"],
    )
    return rows, arrays["commit"]


def _require_counts(arrays: dict[str, NDArray[Any]]) -> None:
    lengths, commit = arrays["lengths"], arrays["commit"]
    if (commit > max(Commit)).any():
        row = int(np.argmax(commit > max(Commit)))
        raise SupportError(f"packed wire row {row} has commit kind {commit[row]}; accepted: 0 to {max(Commit):d}")
    if (lengths < 0).any():
        row = int(np.argmax(lengths < 0))
        raise SupportError(f"packed wire row {row} has length {lengths[row]}; accepted: 0 or more")
    entries = lengths.sum(dtype=np.int64)
    for names, wanted in ((("sampled", "commit", "status"), len(lengths)), (("ids", "logprobs"), entries)):
        for name in names:
            if len(arrays[name]) != wanted:
                raise SupportError(
                    f"packed wire field {name!r} has {len(arrays[name])} entries; accepted: {wanted}, by its 'lengths'"
                )


def _decode(message: dict[str, Any], name: str, dtype: str) -> NDArray[Any]:
    if name not in message:
        raise SupportError(f"packed wire lacks {name!r}; accepted: all of {', '.join(_DTYPES)}")
    try:
        return np.frombuffer(base64.b64decode(message[name], validate=True), dtype=dtype)
    except (binascii.Error, ValueError, TypeError) as error:
        raise SupportError(f"packed wire field {name!r} is not base64 of {dtype} entries: {error}") from error
