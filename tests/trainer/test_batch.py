from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_ext.errors import SupportError
from miles_ext.records import Status
from tests.trainer.rollouts import make_rollout
from trainer.batch import make_batch, mini_batches, plan, token_scale, usable


def with_status(trajectory, row, status):
    support = trajectory.completion.support
    changed = support.status.copy()
    changed[row] = status
    completion = replace(trajectory.completion, support=replace(support, status=changed))
    return replace(trajectory, completion=completion)


def test_each_scored_row_is_the_position_before_its_token(target):
    rollout = make_rollout(target, masked=True, seed=3)
    indices = np.array([2, 0, 5])
    batch = make_batch(rollout, indices, np.array([1.0, 2.0, 3.0]), np.array([0.1, 0.2, 0.3]))
    flat = batch.input_ids.reshape(-1)
    expected = [(i, t) for i in indices for t in np.flatnonzero(rollout[i].loss_mask)]
    assert list(zip(batch.trajectory, batch.token, strict=True)) == expected
    for place, (index, t) in enumerate(expected):
        completion = rollout[index].completion
        prefix = [*completion.prompt_ids, *completion.response_ids[:t]]
        row = batch.rows[place]
        assert flat[row - len(prefix) + 1 : row + 1].tolist() == prefix
        assert (row - len(prefix) + 1) % batch.input_ids.shape[1] == 0
        assert batch.sampled_ids[place] == completion.response_ids[t]
        ours, theirs = batch.support[place : place + 1], completion.support[t : t + 1]
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.logprobs.tolist() == theirs.logprobs.tolist()
        assert ours.sampled_logprobs == theirs.sampled_logprobs
        place_of = indices.tolist().index(index)
        assert (batch.advantages[place], batch.scale[place]) == (place_of + 1.0, (place_of + 1) / 10)
    batch.support.check(batch.sampled_ids, 24)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 4), st.integers(1, 200)
)
def test_the_plan_covers_every_sequence_once_within_the_limit(lengths, world_size, micro_tokens):
    lengths = np.array(lengths)
    ranks = plan(lengths, world_size, micro_tokens)
    assert len(ranks) == world_size and len({len(micro) for micro in ranks}) == 1
    assert sorted(i for micro in ranks for part in micro for i in part) == list(range(len(lengths)))
    for part in (part for micro in ranks for part in micro if len(part) > 1):
        assert len(part) * lengths[part].max() <= micro_tokens


@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.integers(1, 8))
def test_mini_batches_split_no_group(groups, count):
    parts = mini_batches(groups, count)
    assert sorted(i for part in parts for i in part) == list(range(len(groups)))
    owners = [{groups[i] for i in part} for part in parts]
    assert len(parts) == min(count, len(set(groups))) and all(owners)
    assert sum(len(owner) for owner in owners) == len(set(groups))
    order = list(dict.fromkeys(groups))
    firsts = [min(order.index(group) for group in owner) for owner in owners]
    assert firsts == sorted(firsts)


def test_scales_are_global_means():
    masks = [np.array([True, True, False]), np.array([True]), np.array([False])]
    assert token_scale(masks, "token_mean").tolist() == [1 / 3] * 3
    assert token_scale(masks, "sequence_mean")[:2].tolist() == [1 / 4, 1 / 2]
    with pytest.raises(ValueError, match="no loss token"):
        token_scale([np.array([False])], "token_mean")


def test_a_bad_row_stops_the_run_by_name(rollout):
    bad = [*rollout[:3], with_status(rollout[3], 1, Status.OVERFLOW), *rollout[4:]]
    with pytest.raises(SupportError, match="trajectory 3 of prompt 1: support row 1 is OVERFLOW"):
        usable(bad, "stop")


def test_a_bad_row_drops_its_whole_group(rollout):
    bad = [*rollout[:3], with_status(rollout[3], 0, Status.INVALID), *rollout[4:]]
    kept, dropped = usable(bad, "drop_group")
    assert dropped == {1} and kept.tolist() == [0, 1, 4, 5, 6, 7]
    with pytest.raises(SupportError, match="none of 2"):
        usable([bad[2], bad[3]], "drop_group")


def test_rows_that_are_absent_or_of_another_length_are_refused(rollout):
    bare = replace(rollout[0], completion=replace(rollout[0].completion, support=None))
    with pytest.raises(SupportError, match="no support rows"):
        usable([bare], "drop_group")
    with pytest.raises(SupportError, match="one of each a token"):
        usable([replace(rollout[0], loss_mask=rollout[0].loss_mask[1:])], "stop")
    with pytest.raises(SupportError, match="empty prompt"):
        empty = replace(rollout[0].completion, prompt_ids=np.zeros(0, np.int32))
        usable([replace(rollout[0], completion=empty)], "stop")
