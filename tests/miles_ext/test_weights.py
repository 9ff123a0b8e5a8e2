from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_ext.errors import WeightError
from miles_ext.weights import TensorEntry, WeightManifest, combine, tensor_digest

ENTRY = TensorEntry((2, 3), "float32", tensor_digest(b"some bytes"))


@given(st.dictionaries(st.text(min_size=1), st.integers(0, 9), min_size=1), st.randoms())
def test_the_digest_does_not_depend_on_order(sizes, random):
    entries = {name: replace(ENTRY, shape=(size,)) for name, size in sizes.items()}
    names = list(entries)
    random.shuffle(names)
    assert combine(entries) == combine({name: entries[name] for name in names})


@pytest.mark.parametrize(
    "changed",
    [
        {"a": replace(ENTRY, shape=(3, 2))},
        {"a": replace(ENTRY, shape=(6,))},
        {"a": replace(ENTRY, shape=(23,))},
        {"a": replace(ENTRY, dtype="bfloat16")},
        {"a": replace(ENTRY, digest=tensor_digest(b"some byteS"))},
        {"b": ENTRY},
        {"a": ENTRY, "b": ENTRY},
        {},
    ],
)
def test_every_difference_changes_the_digest_and_is_refused(changed):
    manifest = WeightManifest(version=4, tensors={"a": ENTRY})
    manifest.require_received({"a": ENTRY})
    assert manifest.digest == combine({"a": ENTRY}) != combine(changed)
    with pytest.raises(WeightError, match="version 4 did not arrive whole.*nothing was applied"):
        manifest.require_received(changed)


def test_what_is_wrong_is_listed_whole():
    manifest = WeightManifest(version=1, tensors={"a": ENTRY, "b": ENTRY, "c": ENTRY})
    with pytest.raises(WeightError, match=r"missing \['a'\], unexpected \['z'\], different \['b'\]"):
        manifest.require_received({"b": replace(ENTRY, dtype="float16"), "c": ENTRY, "z": ENTRY})


def test_the_tensor_digest_is_that_of_the_bytes():
    assert tensor_digest(b"") == "99aa06d3014798d86001c324468d497f"  # XXH3-128 of nothing, seed 0
    assert tensor_digest(bytearray(b"ab")) == tensor_digest(memoryview(b"ab")) != tensor_digest(b"ba")
