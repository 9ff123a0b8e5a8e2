"""Whatever arrives on the wire is refused with SupportError or keeps the contract: no crash, no silent acceptance.

Messages start out sound and are damaged in one place, so that every check is reached; some are nothing like one.
"""

from __future__ import annotations

import base64
import copy
import json
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from miles_ext.errors import SupportError
from miles_ext.wire import pack, unpack
from tests.miles_ext.laws import same, sampled_rows

VOCABULARY = 64
FIELDS = {"ids": "<i4", "logprobs": "<f4", "lengths": "<i4", "sampled": "<f4", "commit": "u1", "status": "u1"}
ODD = [-1, -(2**31), 2**31 - 1, 2**31 - 2, 10**6, VOCABULARY]
junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=6,
)  # fmt: skip


def received(message, sampled):
    """What a client makes of it: decoded and checked, or SupportError."""
    rows, commit = unpack(message)
    assert len(commit) == len(rows)
    return rows.check(sampled, VOCABULARY), commit


@settings(max_examples=300)
@given(sampled_rows(), st.sampled_from(list(FIELDS)), st.data())
def test_a_damaged_message_is_refused_or_harmless(made, name, data):
    rows, sampled, commit = made
    message = pack(rows, commit)
    raw = bytearray(base64.b64decode(message[name]))
    assume(raw)
    how = data.draw(st.sampled_from(["cut", "grow", "drop", "odd value", "flip", "not base64"]))
    if how == "cut":
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    elif how == "grow":
        raw += data.draw(st.binary(min_size=1, max_size=9))
    elif how == "odd value":
        values = np.frombuffer(bytes(raw), FIELDS[name]).copy()
        odd = {"<f4": [math.nan, math.inf, -math.inf, 5.0], "<i4": ODD, "u1": [255, 9]}[FIELDS[name]]
        values[data.draw(st.integers(0, len(values) - 1))] = data.draw(st.sampled_from(odd))
        raw = bytearray(values.tobytes())
    elif how == "flip":
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    damaged = copy.copy(message)
    damaged[name] = base64.b64encode(bytes(raw)).decode()
    if how == "drop":
        del damaged[name]
    if how == "not base64":
        damaged[name] = data.draw(st.sampled_from(["é", "!", "AAA", "A" * 5, 7, None, [1], {"a": 1}, b"AA=", "AA=A"]))
    try:
        found, kinds = received(json.loads(json.dumps(damaged, default=str)), sampled)
    except SupportError:
        return
    # Another sound value in the place of a value passes, as it must; everything counts and adds up all the same.
    assert how in ("flip", "odd value")
    assert len(found) == len(kinds) == len(sampled) and found.offsets[-1] == len(found.token_ids) == len(found.logprobs)
    ok = found.status == 0
    entries = np.repeat(ok, found.lengths)
    assert np.isfinite(found.logprobs[entries]).all() and np.isfinite(found.sampled_logprobs[ok]).all()
    assert ((found.token_ids[entries] >= 0) & (found.token_ids[entries] < VOCABULARY)).all() and (kinds <= 4).all()


@given(sampled_rows())
def test_an_undamaged_message_passes(made):
    rows, sampled, commit = made
    found, kinds = received(json.loads(json.dumps(pack(rows, commit))), sampled)
    assert same(found, rows) and kinds.tobytes() == commit.tobytes()


@settings(max_examples=200)
@given(junk)
def test_what_is_no_message_is_refused(message):
    with pytest.raises(SupportError):
        unpack(message)


@settings(max_examples=200)
@given(sampled_rows(), st.sampled_from(["v", "kind", *FIELDS]), junk)
def test_a_field_of_another_type_is_refused(made, name, value):
    rows, sampled, commit = made
    message = pack(rows, commit)
    assume(value != message[name] and value != "")
    with pytest.raises(SupportError):
        received(message | {name: value}, sampled)


def test_lengths_that_promise_gigabytes_cost_nothing():
    lengths = np.full(1000, 2**31 - 1, "<i4")
    zeros = {"ids": b"", "logprobs": b"", "sampled": bytes(4000), "commit": bytes(1000), "status": bytes(1000)}
    message = {name: base64.b64encode(raw).decode() for name, raw in zeros.items()}
    with pytest.raises(SupportError, match="accepted: 2147483647000, by its 'lengths'"):
        unpack({"v": 1, "kind": "head", **message, "lengths": base64.b64encode(lengths.tobytes()).decode()})
