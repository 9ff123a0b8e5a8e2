"""Rows on the real `Sample`: resume, strip, reset, dict round trips, pickling."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from miles_ext.errors import SupportError
from miles_ext.miles_adapter import samples
from miles_ext.miles_adapter.samples import SampleRows
from miles_ext.sampling import SamplingSpec
from tests.miles.batches import packed
from tests.miles.hooks import samples_of

SPEC = SamplingSpec(capture="head", head_size=6)


class Tokenizer:
    def decode(self, ids):
        return "x" * len(ids)


@pytest.fixture
def sample():
    from miles.utils.types import Sample

    samples.follow(Sample)
    samples.follow(Sample)  # once is enough
    return samples_of(packed(SPEC))[0]


def whole(sample) -> SampleRows:
    held = samples.rows_of(sample)
    assert held is not None
    return held.require(sample.tokens[-sample.response_length :], SPEC, "the sample")


def test_rows_follow_a_strip(sample):
    first = whole(sample).rows.sampled_logprobs[:3].tolist()
    sample.strip_last_output_tokens(2, Tokenizer())
    assert sample.response_length == 3 and whole(sample).rows.sampled_logprobs.tolist() == first
    sample.validate()
    sample.strip_last_output_tokens(0, Tokenizer())
    assert len(whole(sample)) == 3


def test_a_strip_that_does_not_know_them_leaves_rows_that_are_refused(sample):
    """The control: Miles' own method."""
    type(sample).strip_last_output_tokens.__wrapped__(sample, 2, Tokenizer())
    with pytest.raises(SupportError, match="5 support rows for a response of 3 tokens"):
        whole(sample)


def test_reset_forgets_them(sample):
    sample.reset_for_retry()
    assert samples.rows_of(sample) is None and sample.response_length == 0
    sample.reset_for_retry()


def test_dict_and_pickle_round_trips_keep_them(sample):
    before = whole(sample)
    for copy in (type(sample).from_dict(sample.to_dict()), pickle.loads(pickle.dumps(sample))):
        after = whole(copy)
        assert after.rows.token_ids.tobytes() == before.rows.token_ids.tobytes() and after.spec == before.spec
    copy = type(sample).from_dict(pickle.loads(pickle.dumps(sample.to_dict())))
    copy.strip_last_output_tokens(1, Tokenizer())
    assert (len(whole(copy)), len(whole(sample))) == (4, 5)


def test_a_resumed_response_goes_on_with_its_rows(sample):
    more = samples.rows_of(samples_of(packed(SPEC, seed=1))[1])
    assert more is not None
    before = len(whole(sample))
    samples.append(sample, more)
    held = samples.rows_of(sample)
    assert held is not None and len(held) == before + len(more)
    assert held.rows.sampled_logprobs[before:].tolist() == more.rows.sampled_logprobs.tolist()


@pytest.mark.parametrize("change", [{"spec": replace(SPEC, temperature=0.5)}, {"vocab_size": 99}])
def test_a_response_must_not_go_on_under_another_law(change, sample):
    more = samples.rows_of(sample)
    assert more is not None
    with pytest.raises(SupportError, match="goes on with"):
        samples.append(sample, replace(more, **change))
