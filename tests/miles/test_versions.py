"""The signatures that the adapters rely on, against the real functions; anything else is refused by name."""

from __future__ import annotations

import pytest

from miles_ext.errors import CapabilityError
from miles_ext.miles_adapter import versions


@pytest.mark.parametrize("side", ["rollout", "trainer"])
def test_this_miles_is_one_that_the_adapters_were_written_for(side):
    assert versions.version(side) in versions.VERSIONS


def test_another_signature_is_refused_with_the_functions_name(monkeypatch):
    model = versions.resolve("miles.backends.megatron_utils.model")
    versions.version.cache_clear()
    monkeypatch.setattr(model, "get_batch", lambda data_iterator, wanted: None)
    with pytest.raises(CapabilityError, match=r"model:get_batch takes \(data_iterator, wanted\), wanted \(data_it"):
        versions.version("trainer")
    monkeypatch.undo()
    monkeypatch.delattr(model, "get_batch")
    with pytest.raises(CapabilityError, match=r"model:get_batch takes nothing: it is absent"):
        versions.version("trainer")
    monkeypatch.undo()
    versions.version.cache_clear()
    versions.version("trainer")
