"""The support log: rows reach the response and position they belong to, whatever order they were committed in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import rollout.embedded.capture
from miles_ext.law import law
from miles_ext.records import Status, SupportRows
from rollout.embedded.capture import SupportLog
from tests.rollout.tiny import DEVICES

VOCAB = 64


class Session:
    """Random laws of random committed tokens, some of them behind rejected slots, and the log that saw them."""

    def __init__(self, kind, sizes: list[int], device: str, **filters) -> None:
        self.device = device
        random = np.random.default_rng(3)
        generator = torch.Generator().manual_seed(3)
        self.laws: dict[tuple[int, int], torch.Tensor] = {}
        self.tokens = np.zeros((len(sizes), 40), np.int32)
        self.length = np.zeros(len(sizes), np.int64)
        self.log = SupportLog(kind, np.array(sizes), self.tokens)
        for _ in range(8):
            requests = random.permutation(len(sizes))[: random.integers(1, len(sizes) + 1)]
            probs = law(torch.randn(len(requests) * 4, VOCAB, generator=generator) * 3, **filters)
            probs = probs.view(-1, 4, VOCAB).to(device)
            count, start = random.integers(0, 5, len(requests)), self.length[requests]
            for b, request in enumerate(requests):
                for j in range(count[b]):
                    row = probs[b, j].cpu()
                    self.laws[int(request), int(start[b]) + j] = row
                    self.tokens[request, start[b] + j] = torch.multinomial(row, 1, generator=generator)
            self.length[requests] += count
            self.log.add(probs, requests, start, count)

    def check(self, found: list[SupportRows]) -> None:
        for request, rows in enumerate(found):
            assert len(rows) == self.length[request]
            rows.check(self.tokens[request, : len(rows)], VOCAB)
            for t in range(len(rows)):
                row, expected = rows[t : t + 1], self.laws[request, t]
                # The device's own logarithm: another's may round the last bit the other way.
                logs = expected[row.token_ids].to(self.device).log().cpu()
                np.testing.assert_array_equal(row.logprobs, logs.numpy())
                assert row.kind == "head" or len(row.token_ids) == (expected > 0).sum()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("budget", [1, 5000, 1 << 20])
@pytest.mark.parametrize("filters", [{}, {"top_k": 7}, {"top_p": 0.8}], ids=str)
def test_complete_rows(filters: dict, budget: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout.embedded.capture, "PACK_ENTRIES", budget)
    session = Session("complete", [0] * 5, device, **filters)
    session.check(session.log.rows(np.zeros(5, np.uint8)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("budget", [1, 5000, 1 << 20])
@pytest.mark.parametrize("sizes", [[6] * 5, [1, 9, 4, VOCAB, 9]], ids=str)
def test_head_rows(sizes: list[int], budget: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout.embedded.capture, "PACK_ENTRIES", budget)
    session = Session("head", sizes, device)
    found = session.log.rows(np.zeros(5, np.uint8))
    session.check(found)
    assert [set(rows.lengths.tolist()) for rows in found] == [{size} for size in sizes]


def test_a_failed_last_token_gets_an_empty_row() -> None:
    session = Session("complete", [0] * 3, "cpu", top_k=5)
    rows = session.log.rows(np.array([0, Status.OVERFLOW, Status.INVALID], np.uint8))
    for request, status in enumerate((None, Status.OVERFLOW, Status.INVALID)):
        assert len(rows[request]) == session.length[request] + (status is not None)
        if status is not None:
            assert rows[request].status[-1] == status and not rows[request].status[:-1].any()
            assert rows[request].lengths[-1] == 0 and np.isnan(rows[request].sampled_logprobs[-1])


def test_nothing_captured_is_empty_or_failed() -> None:
    log = SupportLog("head", np.array([4, 4]), np.zeros((2, 3), np.int32))
    rows = log.rows(np.array([0, Status.INVALID], np.uint8))
    assert len(rows[0]) == 0 and rows[1].status.tolist() == [Status.INVALID]


def test_laws_do_not_pile_up() -> None:
    """Unpacked laws never exceed the budget by more than a step, and a head keeps K entries of V."""
    log = SupportLog("head", np.full(4, 8), np.zeros((4, 200), np.int32))
    vocab = 50_000
    for t in range(100):
        log.add(torch.full((4, 1, vocab), 1 / vocab), np.arange(4), np.full(4, t), np.ones(4, np.int64))
        assert log._held < rollout.embedded.capture.PACK_ENTRIES + 4 * vocab
    assert sum(part.ids.nbytes + part.logprobs.nbytes for part in log._packed) <= 400 * 8 * 8
