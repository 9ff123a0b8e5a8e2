"""How responses end: stop ids inside a block, stop strings, lengths and the context limit, with rows still aligned."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from miles_ext.capability import ArmKind
from miles_ext.errors import RequestError
from miles_ext.records import Commit, Completion
from miles_ext.sampling import SamplingSpec
from rollout.embedded.engine import EmbeddedEngine
from rollout.engine import Request
from tests.rollout.tiny import ARMS, SHIPPED, VOCAB, Reference, dense, requests

EOS = 15
SHIPPED_VOCAB = 512


def _problems(count: int, **changes) -> list[Request]:
    """Additions for the shipped model, whose text is one character a token and ends with a newline."""
    return [
        Request(
            request_id=str(i),
            prompt_ids=np.array([7, 8, i % 10, 10, 1, 2, 1, 11], np.int32),
            spec=SamplingSpec(seed=i, capture=changes.get("capture", "head")),
            max_new_tokens=changes.get("max_new_tokens", 60),
            stop_ids=changes.get("stop_ids", (EOS,)),
            stop_strings=changes.get("stop_strings", ()),
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module", params=ARMS)
def engine(request: pytest.FixtureRequest) -> EmbeddedEngine:
    return EmbeddedEngine(SHIPPED / "target", SHIPPED / "draft", request.param, max_concurrency=16, context_length=64)


def _assert_aligned(done: list[Completion], specs: list[SamplingSpec]) -> None:
    """Every row is the law that transformers computes at the very position of its token."""
    reference = Reference(SHIPPED / "target")
    for one, spec in zip(done, specs, strict=True):
        one.check(SHIPPED_VOCAB)
        found = dense(one, SHIPPED_VOCAB)
        known = ~np.isnan(found)
        assert np.abs(np.where(known, found - reference.laws(one, spec), 0)).sum(-1).max() <= 2e-5
        assert one.commit[0] == Commit.PREFILL and not (one.commit[1:] == Commit.PREFILL).any()


def test_stop_ids_end_a_response_inside_a_block(engine: EmbeddedEngine) -> None:
    wanted = _problems(40)
    done = engine.generate(wanted)
    _assert_aligned(done[:8], [one.spec for one in wanted[:8]])
    assert all((one.response_ids == EOS).sum() <= 1 for one in done)
    stopped = [one for one in done if one.finish_reason == "stop"]
    assert len(stopped) > 30 and all(one.response_ids[-1] == EOS for one in stopped)
    if engine.kind == "regular":
        assert {kind for one in done for kind in one.commit.tolist()} == {Commit.PREFILL, Commit.PLAIN}
        assert all(one.spec.live_steps == len(one) - 1 and not one.spec.proposed for one in done)
        return
    assert Counter(int(one.commit[-1]) for one in stopped)[Commit.DRAFT] > 5  # ended by an accepted draft
    kinds = Counter(kind for one in done for kind in one.commit.tolist())
    assert all(kinds[kind] > 5 for kind in (Commit.DRAFT, Commit.REJECT_BONUS, Commit.FULL_BONUS))
    for one in done:
        bonuses = np.isin(one.commit, (Commit.REJECT_BONUS, Commit.FULL_BONUS)).sum()
        assert one.spec.accepted == (one.commit == Commit.DRAFT).sum()
        assert bonuses <= one.spec.live_steps <= bonuses + 1  # the last block may be cut before its bonus
        assert one.spec.proposed == 7 * one.spec.live_steps


def test_length_and_context_limits_inside_a_block(engine: EmbeddedEngine) -> None:
    for limit in range(1, 9):
        done = engine.generate(_problems(4, stop_ids=(), max_new_tokens=limit))
        assert [len(one) for one in done] == [limit] * 4 and all(one.finish_reason == "length" for one in done)
    wanted = _problems(8, stop_ids=(), max_new_tokens=500)
    done = engine.generate(wanted)
    assert all(len(one.prompt_ids) + len(one) == 64 and one.finish_reason == "length" for one in done)
    _assert_aligned(done, [one.spec for one in wanted])


def test_stop_strings_keep_tokens_and_trim_text(engine: EmbeddedEngine) -> None:
    whole = engine.generate(_problems(24, stop_ids=()))
    for string in (";", "c0;8", "|", "zzz"):
        for full, cut in zip(
            whole, engine.generate(_problems(24, stop_ids=(), stop_strings=("zz", string))), strict=True
        ):
            assert full.response_ids[: len(cut)].tolist() == cut.response_ids.tolist()
            cut.check(SHIPPED_VOCAB)
            at = full.text.find(string)
            if at < 0:
                assert cut.finish_reason == "length" and cut.text == full.text
            else:
                assert cut.finish_reason == "stop" and cut.text == full.text[:at]
                assert len(cut) == at + len(string)  # one character a token


def test_the_first_of_stop_id_and_stop_string_wins(engine: EmbeddedEngine) -> None:
    for one in engine.generate(_problems(12, stop_strings=("\n",))):
        if one.finish_reason == "stop":
            assert one.response_ids[-1] == EOS and "\n" not in one.text
    for one in engine.generate(_problems(12, stop_ids=(EOS, 14), stop_strings=("c",))):
        assert not np.isin(one.response_ids[:-1], (EOS, 14)).any() and "c" not in one.text


@pytest.mark.parametrize("arm", ARMS)
def test_outputs_do_not_depend_on_the_company(arm: ArmKind, target: Path, draft: Path) -> None:
    """Alone, in a full batch, in a small batch with a queue and in another order: the same responses and rows."""
    wanted = requests(9, max_new_tokens=30, stop_ids=(3,)) + requests(
        9, seed=50, max_new_tokens=12, capture="head", temperature=0.8
    )
    wanted[4] = replace(wanted[4], max_new_tokens=1)
    large = EmbeddedEngine(target, draft, arm, max_concurrency=32, context_length=64).generate(wanted)
    small_engine = EmbeddedEngine(target, draft, arm, max_concurrency=4, context_length=64)
    alone = [small_engine.generate([one])[0] for one in wanted]
    backwards = small_engine.generate(wanted[::-1])[::-1]
    for others in (alone, small_engine.generate(wanted), backwards):
        for one, other in zip(large, others, strict=True):
            assert one.response_ids.tolist() == other.response_ids.tolist()
            assert one.commit.tolist() == other.commit.tolist()
            assert one.support is not None and other.support is not None
            np.testing.assert_allclose(
                np.exp(one.support.sampled_logprobs), np.exp(other.support.sampled_logprobs), atol=2e-6
            )
            one.check(VOCAB)
            other.check(VOCAB)
    assert len({len(one) for one in large}) > 3, "the requests must end at different times"


def test_a_queue_is_served_in_slots_that_fall_free(target: Path, draft: Path) -> None:
    engine = EmbeddedEngine(target, draft, "dflash2", max_concurrency=3, context_length=64)
    done = engine.generate(requests(40, max_new_tokens=17, stop_ids=(1, 2, 3, 4, 5, 6)))
    assert [one.check(VOCAB).finish_reason for one in done].count("stop") > 20
    assert engine.generate([]) == []


def test_a_session_stepped_by_hand_is_a_call_of_generate(target: Path, draft: Path) -> None:
    engine = EmbeddedEngine(target, draft, "dflash2", max_concurrency=3, context_length=64)
    session, steps = engine.start(requests(7)), 1
    while session.advance():
        steps += 1
    assert steps > 20 and not session.advance()
    whole = [one.response_ids.tolist() for one in engine.generate(requests(7))]
    assert [one.response_ids.tolist() for one in engine.finish(session)] == whole


BAD = [
    ({"prompt_ids": np.zeros(0, np.int32)}, "the prompt is empty"),
    ({"prompt_ids": np.zeros(64, np.int32)}, "leaves no room in a context of 64"),
    ({"prompt_ids": np.array([VOCAB], np.int32)}, "outside"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ({"stop_strings": ("a",)}, "tokenizer.json"),
    ({"spec": SamplingSpec(max_support=VOCAB - 1)}, "max_support"),
    ({"spec": SamplingSpec(capture="head", head_size=VOCAB + 1)}, "lower head_size"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_a_bad_request_is_refused_before_anything_runs(change: dict, message: str, target: Path) -> None:
    engine = EmbeddedEngine(target, context_length=64)
    with pytest.raises(RequestError, match=message):
        engine.generate([*requests(1), replace(requests(1)[0], **change)])
