from dataclasses import replace

import pytest

from miles_ext.sampling import SamplingSpec


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"filter_order": "top_p_first"}, "filter_order is 'top_p_first'"),
        ({"capture": "tail"}, "capture is 'tail'"),
        ({"head_size": 0}, "head_size 0"),
        ({"max_support": 0}, "max_support 0"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, f"seed is {2**63}"),
        ({"capture": "head", "top_k": 5}, "capture 'head' beside top_k=5"),
        ({"capture": "head", "top_p": 0.9}, "top_p=0.9"),
        ({"temperature": 0.0}, "temperature 0 has no law to capture"),
    ],
)
def test_what_cannot_be_sampled_is_refused_with_its_value(fields, complaint):
    with pytest.raises(ValueError) as caught:
        SamplingSpec(**fields)
    assert complaint in str(caught.value)


def test_properties():
    assert not SamplingSpec().is_filtered and not SamplingSpec().is_greedy
    assert SamplingSpec(top_k=1).is_filtered and SamplingSpec(top_p=0.5).is_filtered
    assert SamplingSpec(temperature=0.0, capture="off").is_greedy


def test_vocabularies_that_do_not_fit():
    whole = SamplingSpec(max_support=100)
    whole.require_vocabulary(100)
    with pytest.raises(ValueError, match="101 > 100"):
        whole.require_vocabulary(101)
    replace(whole, top_k=5).require_vocabulary(10**6)
    head = SamplingSpec(capture="head", head_size=8)
    head.require_vocabulary(8)
    with pytest.raises(ValueError, match="head_size 8 exceeds the vocabulary of 7"):
        head.require_vocabulary(7)
