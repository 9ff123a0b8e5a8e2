"""The plugin recognises the functions it was written for, and names what it does not recognise."""

import pytest

from miles_ext.sglang_plugin import guard

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("plugin")]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_complaints", {})
    monkeypatch.setattr(guard, "_targets", {})


def test_every_promise_is_in_force_on_the_pinned_version() -> None:
    assert guard.complaints() == []
    assert guard.missing() == []
    wanted = {"strict_refusal", "one_law", "cutoff_ties", "overflow", "flat_capture", "target_only_weights"}
    assert wanted <= guard.in_force()


@pytest.mark.usefixtures("fresh")
def test_a_changed_function_is_named_and_takes_its_feature_with_it() -> None:
    target = "sglang.srt.layers.sampler.Sampler.forward"
    good = guard.source_digest(target)
    assert guard.check("one_law", target, good)
    assert not guard.check("one_law", "sglang.srt.layers.sampler.Sampler._preprocess_logits", "0" * 16)
    assert "one_law" not in guard.in_force()
    assert "_preprocess_logits: source digest is" in " ".join(guard.missing(["one_law"]))


@pytest.mark.usefixtures("fresh")
def test_a_missing_function_is_named() -> None:
    assert not guard.check("one_law", "sglang.srt.layers.sampler.Sampler.no_such_function", "0" * 16)
    assert "no_such_function: not found" in guard.missing(["one_law"])[0]


@pytest.mark.usefixtures("fresh")
def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "version", lambda _: "0.5.24")
    target = "sglang.srt.layers.sampler.Sampler.forward"
    assert not guard.check("one_law", target, guard.source_digest(target))
    assert "sglang is 0.5.24" in guard.missing(["one_law"])[0]


@pytest.mark.usefixtures("fresh")
def test_a_hook_that_sglang_did_not_apply_is_named() -> None:
    target = "sglang.srt.layers.sampler.create_sampler"
    assert guard.check("one_law", target, guard.source_digest(target))
    assert guard.missing(["one_law"]) == [f"{target}: hook not applied"]


@pytest.mark.usefixtures("fresh")
def test_a_feature_that_was_never_registered_is_named() -> None:
    assert guard.missing() and all("not registered" in line for line in guard.missing())
