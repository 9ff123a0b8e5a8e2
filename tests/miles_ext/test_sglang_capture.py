"""The plugin's packing and its way to the wire, without sglang: against the law's own rows."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from miles_ext.law import head, law, sample
from miles_ext.records import Commit, Status, SupportRows
from miles_ext.sglang_plugin import pack as packing
from miles_ext.sglang_plugin.pack import pack
from miles_ext.sglang_plugin.plan import COMPLETE, HEAD, OFF, plan_of
from miles_ext.sglang_plugin.rows import DeviceRows, Piece, encode, verify_kinds
from miles_ext.sglang_plugin.stream import around_update_meta_info, message_of
from miles_ext.wire import unpack

VOCABULARY = 60
BLOCK = 4


class StandInRequest(SimpleNamespace):
    """What the plugin asks of sglang's Req. It has finished, so a failed row needs no abort of sglang's making."""

    def finished(self) -> bool:
        return True


def request(capture: str, k: int, **params: Any) -> StandInRequest:
    filters = {"temperature": 1.0, "top_k": 1 << 30, "top_p": 1.0, **params}
    asked = None if capture == "none" else {"sc": {"v": 1, "capture": capture, "k": k}}
    return StandInRequest(sampling_params=SimpleNamespace(**filters, custom_params=asked))


class Step:
    """One verify step over the given requests, its law and its committed tokens."""

    def __init__(self, requests: list[StandInRequest], seed: int, logits: torch.Tensor | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        n = len(requests) * BLOCK
        self.plan = plan_of(requests)
        if logits is None:
            logits = torch.randn(n, VOCABULARY, generator=generator) * 3
        self.probs = law(logits, *self.plan.repeat(BLOCK))
        self.tokens = sample(self.probs, torch.rand(n, generator=generator, dtype=torch.float64))
        self.committed = torch.randint(1, BLOCK + 1, (len(requests),), generator=generator)
        self.batch = SimpleNamespace(reqs=requests)

    def run(self, visible: list[int] | None = None) -> None:
        """Pack, copy to the host and hand out. visible: tokens of each request that count (a stop may cut)."""
        packed = pack(self.probs, self.tokens, self.committed, self.plan)
        host = DeviceRows(packed, BLOCK, verified=True).copy_to_host(lambda tensor: tensor.clone())
        counts = self.committed.tolist() if visible is None else visible
        host.consume(self.batch, [SimpleNamespace(token_ids=(0,) * n) if n else None for n in counts])

    def expected(self, index: int, count: int) -> tuple[list[dict[int, float]], list[int], list[float]]:
        rows = slice(index * BLOCK, index * BLOCK + count)
        kind, size = self.plan.capture[index], int(self.plan.size[index])
        probs, tokens = self.probs[rows], self.tokens[rows]
        if kind == HEAD:
            ids, logprobs = head(probs, size)
            entries = [dict(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), logprobs.tolist(), strict=True)]
        else:
            entries = [
                dict(zip(torch.nonzero(row)[:, 0].tolist(), row[row > 0].log().tolist(), strict=True)) for row in probs
            ]
        return entries, tokens.tolist(), probs.gather(1, tokens[:, None])[:, 0].log().tolist()


def response(req: StandInRequest) -> tuple[SupportRows, np.ndarray]:
    """The request's rows as a client decodes them from the response."""
    return answer([message_of(req)])


def answer(messages: list[list[Piece]]) -> tuple[SupportRows, np.ndarray]:
    """What a client decodes where the request's outputs brought these messages, the last of them at its end."""
    state, meta = SimpleNamespace(), {}
    for i, message in enumerate(messages):
        end = {"type": "length"} if i == len(messages) - 1 else None
        around_update_meta_info(lambda *_: None, None, meta, state, {"sc": [message]}, 0, end)
        assert ("sc" in meta) == (end is not None)
    return unpack(meta["sc"])


@pytest.mark.parametrize("seed", range(4))
def test_mixed_batch_reaches_the_wire_as_the_law_says(seed: int) -> None:
    requests = [
        request("complete", 60, top_k=5, top_p=0.8), request("head", 7), request("none", 0),
        request("complete", 60, top_p=0.7, temperature=0.6), request("head", 12, temperature=1.4),
        request("off", 9), request("complete", 60),
    ]  # fmt: skip
    step = Step(requests, seed)
    step.run()
    for index, req in enumerate(requests):
        if step.plan.capture[index] == OFF:
            assert not hasattr(req, "sc_rows")
            continue
        count = int(step.committed[index])
        entries, tokens, sampled = step.expected(index, count)
        rows, commit = response(req)
        rows.check(np.array(tokens), VOCABULARY)
        assert rows.sampled_logprobs.tolist() == sampled
        assert len(rows) == len(commit) == count
        for t, expected in enumerate(entries):
            got = rows[t : t + 1]
            assert dict(zip(got.token_ids.tolist(), got.logprobs.tolist(), strict=True)) == expected


def test_steps_accumulate_and_a_stop_cuts_the_rows_after_it() -> None:
    req = request("complete", 60, top_k=4)
    tokens: list[int] = []
    for seed in range(5):
        step = Step([req], seed)
        cut = max(1, int(step.committed[0]) - 1)
        step.run(visible=[cut])
        tokens += step.tokens[:cut].tolist()
    rows, commit = response(req)
    rows.check(np.array(tokens), VOCABULARY)
    assert len(commit) == len(tokens)
    assert message_of(req) == []  # sent once


def test_an_uncommitted_request_keeps_nothing() -> None:
    req = request("complete", 60, top_k=4)
    Step([req], 0).run(visible=[0])
    assert not hasattr(req, "sc_rows")


def test_rows_cross_in_pieces_and_come_out_whole() -> None:
    requests = [request("complete", 60, top_k=4), request("head", 9)]
    whole = [request("complete", 60, top_k=4), request("head", 9)]
    messages: list[list[list[Piece]]] = [[], []]
    for seed in range(6):
        for reqs in (requests, whole):
            Step(reqs, seed).run()
        if seed % 2:
            for sent, req in zip(messages, requests, strict=True):
                sent.append(message_of(req))
    for sent, req in zip(messages, whole, strict=True):
        # The last output of a response may bring no rows of its own.
        rows, commit = answer([*sent, []])
        wanted, wanted_commit = response(req)
        assert len(rows) >= 6 and np.array_equal(commit, wanted_commit)
        for name in ("token_ids", "logprobs", "offsets", "sampled_logprobs", "status"):
            assert np.array_equal(getattr(rows, name), getattr(wanted, name)), name


def test_uncommitted_positions_take_no_room() -> None:
    step = Step([request("complete", 60), request("head", 5)], 3)
    step.committed[:] = torch.tensor([1, 2])
    lengths = pack(step.probs, step.tokens, step.committed, step.plan).flat[: 6 * BLOCK].view(-1, 3)[:, 0].tolist()
    assert lengths == [5, 5, 0, 0, VOCABULARY, 0, 0, 0]  # head rows come first


def test_overflow_is_flagged_and_empty_and_spares_its_neighbours() -> None:
    narrow, wide = request("complete", 3, top_k=6), request("complete", 60, top_k=6)
    step = Step([narrow, wide], 1)
    step.run()
    rows, _ = response(narrow)
    assert set(rows.status) == {Status.OVERFLOW}
    assert not rows.lengths.any()
    rows, _ = response(wide)
    assert not rows.status.any()
    assert (rows.lengths == 6).all()


def test_a_row_longer_than_its_share_of_the_step_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "STEP_ENTRIES", 2 * BLOCK * (VOCABULARY - 1))
    requests = [request("complete", 60), request("complete", 60, top_k=5)]
    Step(requests, 2).run()
    first, second = (response(req)[0] for req in requests)
    assert set(first.status) == {Status.OVERFLOW}
    assert not second.status.any()


def test_ties_far_beyond_top_k_are_fetched_and_not_lost() -> None:
    req = request("complete", 60, top_k=1)
    logits = torch.zeros(BLOCK, VOCABULARY)
    step = Step([req], 0, logits)
    step.committed[:] = BLOCK
    assert pack(step.probs, step.tokens, step.committed, step.plan).stride < VOCABULARY
    step.run()
    rows, _ = response(req)
    assert (rows.lengths == VOCABULARY).all()
    rows.check(step.tokens.numpy(), VOCABULARY)


def test_a_row_without_a_law_is_invalid() -> None:
    req = request("complete", 60, top_k=5)
    logits = torch.randn(BLOCK, VOCABULARY, generator=torch.Generator().manual_seed(0))
    logits[1] = torch.nan
    step = Step([req], 0, logits)
    step.committed[:] = BLOCK
    step.tokens = step.tokens.clamp_min(0)
    step.run()
    rows, _ = response(req)
    assert rows.status.tolist() == [0, Status.INVALID, 0, 0]


def test_commit_kinds_of_a_verify_step() -> None:
    draft, reject, full = int(Commit.DRAFT), int(Commit.REJECT_BONUS), int(Commit.FULL_BONUS)
    kinds = verify_kinds(np.array([1, 3, 4]), 4).reshape(3, 4)
    assert kinds[0, :1].tolist() == [reject]
    assert kinds[1, :3].tolist() == [draft, draft, reject]
    assert kinds[2].tolist() == [draft, draft, draft, full]


def test_wire_stays_below_eleven_bytes_an_entry_and_sixteen_a_token() -> None:
    req = request("complete", 60)
    for seed in range(8):
        Step([req], seed).run()
    (piece,) = message_of(req)
    _, entries, meta = piece
    size = sum(len(value) for value in encode([piece]).values() if isinstance(value, str))
    assert size <= 11 * len(entries) + 16 * len(meta) + 100


def test_plan_follows_the_batch() -> None:
    requests = [request("complete", 9, top_k=5), request("head", 7), request("none", 0, top_k=1)]
    plan = plan_of(requests)
    assert plan.capture.tolist() == [COMPLETE, HEAD, OFF]
    assert plan.temperature.tolist() == [1.0, 1.0, 0.0]  # sglang spells greedy as top_k 1
    joined = plan.take([2, 0]) + plan_of([request("complete", 4, top_k=1)])
    assert joined.capture.tolist() == [OFF, COMPLETE, COMPLETE]
    assert joined.temperature.tolist() == [0.0, 1.0, 1.0]  # a captured row with top_k 1 keeps its ties
    assert joined.size.tolist() == [0, 9, 4]
