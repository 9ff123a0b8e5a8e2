import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from miles_ext import wire
from miles_ext.errors import SupportError
from miles_ext.records import Completion, Status, SupportRows
from tests.miles_ext.laws import VOCAB, same, sampled_rows


@given(sampled_rows())
def test_valid_rows_pass(made):
    rows, tokens, _ = made
    assert rows.check(tokens, VOCAB) is rows


@given(sampled_rows(), st.data())
def test_slices_and_concatenations_preserve_rows(made, data):
    rows, tokens, _ = made
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    bounds = list(zip([0, *cuts], [*cuts, len(rows)], strict=True))
    parts = [rows[start:stop] for start, stop in bounds]
    for part, (start, stop) in zip(parts, bounds, strict=True):
        assert len(part) == stop - start and part.offsets[0] == 0
        assert np.shares_memory(part.token_ids, rows.token_ids) or not part.token_ids.size
        part.check(tokens[start:stop], VOCAB)
    assert same(SupportRows.concatenate(parts), rows)
    start, stop = data.draw(st.integers(-15, 15)), data.draw(st.integers(-15, 15))
    part, expected = rows[start:stop], range(len(rows))[start:stop]
    assert len(part) == len(expected)
    assert all(same(part[i : i + 1], rows[t : t + 1]) for i, t in enumerate(expected))


@given(sampled_rows(), st.data())
def test_rows_survive_cutting_the_wire_and_pickling_in_any_order(made, data):
    rows, tokens, commit = made
    cut = data.draw(st.integers(0, len(rows)))
    halves = []
    for part in (slice(0, cut), slice(cut, None)):
        received, kinds = wire.unpack(wire.pack(rows[part], commit[part]))
        assert kinds.tolist() == commit[part].tolist()
        halves.append(pickle.loads(pickle.dumps(received)))
    whole = SupportRows.concatenate(halves)
    assert same(whole, rows)
    whole.check(tokens, VOCAB)


def test_kinds_do_not_mix_and_steps_are_refused():
    with pytest.raises(SupportError, match=r"\['complete', 'head'\]"):
        SupportRows.concatenate([SupportRows.empty("complete"), SupportRows.empty("head")])
    with pytest.raises(SupportError, match="one part or more"):
        SupportRows.concatenate([])
    with pytest.raises(SupportError, match="step 2"):
        SupportRows.empty("head")[::2]


# Each corruption spoils row t of arrays that it may write to, and is refused for its reason; None: it does not apply.


def _entry(rows, t):
    return int(rows.offsets[t])


def _sampled_entry(rows, tokens, t):
    found = np.flatnonzero(rows.token_ids[rows.offsets[t] : rows.offsets[t + 1]] == tokens[t])
    return _entry(rows, t) + int(found[0]) if len(found) else None


def id_negative(rows, tokens, t):
    rows.token_ids[_entry(rows, t)] = -1
    return "id outside"


def id_beyond_the_vocabulary(rows, tokens, t):
    rows.token_ids[_entry(rows, t)] = VOCAB
    return "id outside"


def id_twice(rows, tokens, t):
    if rows.lengths[t] < 2:
        return None
    rows.token_ids[_entry(rows, t)] = rows.token_ids[_entry(rows, t) + 1]
    return "an id occurs twice"


def logprob_nan(rows, tokens, t):
    rows.logprobs[_entry(rows, t)] = np.nan
    return "a logprob is not finite"


def logprob_of_nothing(rows, tokens, t):
    rows.logprobs[_entry(rows, t)] = -np.inf
    return "a logprob is not finite"


def sampled_nan(rows, tokens, t):
    rows.sampled_logprobs[t] = np.nan
    return "the sampled logprob is not finite"


def sampled_off_by_one_bit(rows, tokens, t):
    if _sampled_entry(rows, tokens, t) is None:
        return None
    rows.sampled_logprobs[t] = np.nextafter(rows.sampled_logprobs[t], np.float32(-np.inf))
    return "the sampled logprob differs"


def mass_scaled(rows, tokens, t):
    part = slice(rows.offsets[t], rows.offsets[t + 1])
    if rows.kind == "head" and np.exp(rows.logprobs[part].astype(float)).sum() < 0.9:
        return None
    rows.logprobs[part] += 0.2
    rows.sampled_logprobs[t] += np.float32(0.2)
    return "mass"


def mass_of_a_little_more(rows, tokens, t):
    if rows.kind == "head":
        return None
    entry = _entry(rows, t) + int(np.argmax(rows.logprobs[rows.offsets[t] : rows.offsets[t + 1]]))
    if entry == _sampled_entry(rows, tokens, t):
        return None
    rows.logprobs[entry] += 1e-2
    return "mass is not 1"


def support_cut_short(rows, tokens, t):
    """The likeliest entry is renamed to a token that is already gone: same layout, less law."""
    if rows.kind == "head" or rows.lengths[t] < 2:
        return None
    entry = _entry(rows, t) + int(np.argmax(rows.logprobs[rows.offsets[t] : rows.offsets[t + 1]]))
    if entry == _sampled_entry(rows, tokens, t):
        return None
    rows.logprobs[entry] = -60.0
    return "mass is not 1"


def token_outside_its_support(rows, tokens, t):
    outside = np.setdiff1d(np.arange(VOCAB), rows.token_ids[rows.offsets[t] : rows.offsets[t + 1]])
    if rows.kind == "head" or not len(outside):
        return None
    tokens[t] = outside[0]
    return "the committed token is not in its support"


def head_out_of_order(rows, tokens, t):
    first, last = _entry(rows, t), int(rows.offsets[t + 1]) - 1
    if rows.kind == "complete" or rows.logprobs[first] == rows.logprobs[last]:
        return None
    for array in (rows.token_ids, rows.logprobs):
        array[[first, last]] = array[[last, first]]
    return "not in order"


def likely_token_outside_the_head(rows, tokens, t):
    """The committed token is renamed out of a head that it must belong to."""
    entry = _sampled_entry(rows, tokens, t)
    outside = np.setdiff1d(np.arange(VOCAB), rows.token_ids[rows.offsets[t] : rows.offsets[t + 1]])
    if rows.kind == "complete" or entry is None or not len(outside):
        return None
    if rows.logprobs[entry] == rows.logprobs[rows.offsets[t + 1] - 1]:
        return None
    tokens[t] = outside[0]
    return "likelier than the head's last"


def status_unknown(rows, tokens, t):
    rows.status[t] = 3
    return "status 3 is unknown"


CORRUPTIONS = [
    id_negative, id_beyond_the_vocabulary, id_twice, logprob_nan, logprob_of_nothing, sampled_nan,
    sampled_off_by_one_bit, mass_scaled, mass_of_a_little_more, support_cut_short, token_outside_its_support,
    head_out_of_order, likely_token_outside_the_head, status_unknown,
]  # fmt: skip


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda corrupt: corrupt.__name__)
@given(made=sampled_rows(min_rows=1), data=st.data())
def test_every_corruption_is_refused_by_row_and_reason(corrupt, made, data):
    rows, tokens, _ = made
    sound = np.flatnonzero(rows.status == Status.OK)
    assume(len(sound))
    rows = replace(
        rows, token_ids=rows.token_ids.copy(), logprobs=rows.logprobs.copy(),
        sampled_logprobs=rows.sampled_logprobs.copy(), status=rows.status.copy(),
    )  # fmt: skip
    tokens = tokens.copy()
    t = data.draw(st.sampled_from(sound.tolist()))
    reason = corrupt(rows, tokens, t)
    assume(reason is not None)
    with pytest.raises(SupportError, match=rf"^support row {t}: .*{reason}"):
        rows.check(tokens, VOCAB)


def one_law_a_row(num_rows, rng):
    """Complete rows over the whole vocabulary that differ from each other."""
    law = np.log(rng.dirichlet(np.ones(VOCAB), num_rows)).astype(np.float32)
    tokens = rng.integers(0, VOCAB, num_rows).astype(np.int32)
    rows = SupportRows(
        token_ids=np.tile(np.arange(VOCAB, dtype=np.int32), num_rows), logprobs=law.reshape(-1),
        offsets=np.arange(num_rows + 1) * VOCAB, sampled_logprobs=law[np.arange(num_rows), tokens], kind="complete",
        status=np.zeros(num_rows, np.uint8),
    )  # fmt: skip
    return rows.check(tokens, VOCAB), tokens


def test_rows_misaligned_by_one_are_refused():
    rows, tokens = one_law_a_row(6, np.random.default_rng(0))
    for shift in (1, -1):
        with pytest.raises(SupportError, match="row 0: the sampled logprob differs"):
            rows.check(np.roll(tokens, shift), VOCAB)
    with pytest.raises(SupportError, match="5 committed tokens; accepted: one of each a token"):
        rows.check(tokens[1:], VOCAB)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"offsets": np.array([0, 50, 40, 150])}, "row 1: offsets must start at 0 and never fall"),
        ({"offsets": np.array([1, 50, 100, 150])}, "row 0: offsets must start at 0"),
        ({"offsets": np.array([0, 50, 100, 149])}, "offsets end at 149 beside 150 ids"),
        ({"offsets": np.array([0, 50, 100])}, "2 rows, 3 sampled logprobs"),
        ({"offsets": np.array([0, 50, 50, 150])}, "row 1: no entries"),
        ({"logprobs": np.zeros(149, np.float32)}, "149 logprobs"),
        ({"sampled_logprobs": np.zeros(2, np.float32)}, "2 sampled logprobs"),
        ({"status": np.zeros(4, np.uint8)}, "4 statuses"),
        ({"kind": "tail"}, "kind 'tail'; accepted: complete, head"),
        ({"token_ids": np.zeros(150, np.int64)}, "token_ids is int64 [150]; accepted: int32, one axis"),
        ({"logprobs": np.zeros(150, np.float64)}, "logprobs is float64"),
        ({"logprobs": np.zeros((3, 50), np.float32)}, "logprobs is float32 [3, 50]"),
        ({"status": np.zeros(3, bool)}, "status is bool"),
        ({"offsets": np.array([0.0, 50.0, 100.0, 150.0])}, "offsets is float64"),
    ],
)  # fmt: skip
def test_broken_layouts_are_refused(change, reason):
    rows, tokens = one_law_a_row(3, np.random.default_rng(1))
    with pytest.raises(SupportError) as caught:
        replace(rows, **change).check(tokens, VOCAB)
    assert reason in str(caught.value)


def test_a_completion_counts_its_tokens():
    rows, tokens = one_law_a_row(3, np.random.default_rng(2))
    completion = Completion(
        prompt_ids=np.array([1], np.int32), response_ids=tokens, support=rows, commit=np.zeros(3, np.uint8),
        weight_version=np.zeros(3, np.int64), finish_reason="stop",
    )  # fmt: skip
    assert completion.check(VOCAB).worst_status is Status.OK and len(completion) == 3
    assert replace(completion, support=None).check(VOCAB).worst_status is Status.OK
    status = np.array([0, 2, 1], np.uint8)
    assert replace(completion, support=replace(rows, status=status)).worst_status is Status.INVALID
    for name in ("commit", "weight_version"):
        with pytest.raises(SupportError, match=f"{name} has 2 entries for 3 committed tokens"):
            replace(completion, **{name: np.zeros(2, np.int64)}).check(VOCAB)
    with pytest.raises(SupportError, match="token 2: commit kind 5; accepted"):
        replace(completion, commit=np.array([0, 4, 5], np.uint8)).check(VOCAB)
    with pytest.raises(SupportError, match="support row 0"):
        replace(completion, response_ids=tokens[::-1].copy()).check(VOCAB)
