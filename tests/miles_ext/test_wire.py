import base64
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_ext.errors import SupportError
from miles_ext.records import SupportRows
from miles_ext.sampling import SamplingSpec
from miles_ext.wire import WIRE_VERSION, pack, request_fields, unpack
from tests.miles_ext.laws import same, sampled_rows

FIELDS = ("ids", "logprobs", "lengths", "sampled", "commit", "status")


def packed(num_rows=2, width=3):
    rows = SupportRows(
        token_ids=np.tile(np.arange(width, dtype=np.int32), num_rows),
        logprobs=np.full(num_rows * width, -1.0, np.float32), offsets=np.arange(num_rows + 1) * width,
        sampled_logprobs=np.full(num_rows, -1.0, np.float32), kind="complete", status=np.zeros(num_rows, np.uint8),
    )  # fmt: skip
    return pack(rows, np.zeros(num_rows, np.uint8))


@given(sampled_rows())
def test_json_brings_back_the_very_bytes(made):
    rows, _, commit = made
    received, kinds = unpack(json.loads(json.dumps(pack(rows, commit))))
    assert same(received, rows) and kinds.tobytes() == commit.tobytes()


@given(st.integers(0, 400), st.integers(0, 130))
def test_size_is_bounded(num_rows, width):
    size = len(json.dumps(packed(num_rows, width)))
    assert size <= 11 * num_rows * width + 16 * num_rows + 200


def test_the_bytes_are_little_endian_arrays_in_the_documented_order():
    message = packed()
    assert set(message) == {"v", "kind", *FIELDS} and message["v"] == WIRE_VERSION == 1
    raw = {name: base64.b64decode(message[name]) for name in FIELDS}
    assert raw["ids"] == b"".join(i.to_bytes(4, "little") for i in (0, 1, 2, 0, 1, 2))
    assert raw["lengths"] == bytes([3, 0, 0, 0] * 2)
    assert raw["logprobs"][:4] == raw["sampled"][:4] == b"\x00\x00\x80\xbf"  # -1.0
    assert raw["commit"] == raw["status"] == b"\x00\x00"


def test_big_endian_arrays_are_turned():
    rows, kinds = unpack(packed())
    turned = SupportRows(
        token_ids=rows.token_ids.astype(">i4"), logprobs=rows.logprobs.astype(">f4"),
        offsets=rows.offsets.astype(">i8"), sampled_logprobs=rows.sampled_logprobs.astype(">f4"),
        kind=rows.kind, status=rows.status,
    )  # fmt: skip
    assert pack(turned, kinds) == packed()


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("damage", [None, "not base64!", "AAA", 7, "AAAAAA=="], ids=str)  # the last: four zero bytes
def test_damaged_fields_are_named(field, damage):
    message = packed()
    if damage is None:
        del message[field]
    else:
        message[field] = damage
    with pytest.raises(SupportError, match=f"packed wire .*'{field}'"):
        unpack(message)


def test_negative_lengths_are_refused():
    message = packed()
    message["lengths"] = base64.b64encode(np.array([7, -1], "<i4").tobytes()).decode()
    with pytest.raises(SupportError, match="row 1 has length -1"):
        unpack(message)


@pytest.mark.parametrize(("field", "value"), [("v", 2), ("v", None), ("kind", "tail"), ("kind", None)])
def test_other_versions_and_kinds_are_refused(field, value):
    with pytest.raises(SupportError, match=rf"(version|kind).*{value!r}"):
        unpack({**packed(), field: value})


def test_request_fields_say_what_is_captured():
    head = SamplingSpec(capture="head", head_size=32, seed=9)
    assert request_fields(head) == {"v": 1, "capture": "head", "k": 32, "order": "top_k_first", "seed": 9}
    whole = SamplingSpec(top_k=8, top_p=0.9, filter_order="joint", max_support=64)
    assert request_fields(whole) == {"v": 1, "capture": "complete", "k": 64, "order": "joint", "seed": 0}
