"""The two verification schemes on laws written by hand: exact frequencies, edges, and what a missing law does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

import rollout.embedded.verify
from miles_ext.seeds import Purpose, uniforms
from rollout.embedded.verify import Verdict, verify_chain, verify_target_only
from tests.rollout.tiny import DEVICES

VOCAB, SLOTS, DRAWS = 5, 3, 60_000
FIRST = torch.tensor([0.5, 0.2, 0.0, 0.2, 0.1])
# The target's law of the second token depends on the first; so does the draft's.
SECOND = torch.tensor(
    [
        [0.1, 0.2, 0.3, 0.4, 0.0],
        [0.2, 0.2, 0.2, 0.2, 0.2],
        [0.9, 0.1, 0.0, 0.0, 0.0],
        [0.0, 0.0, 1.0, 0.0, 0.0],
        [0.25, 0.0, 0.25, 0.25, 0.25],
    ]
)
THIRD = torch.tensor([0.3, 0.3, 0.1, 0.1, 0.2])
CANDIDATES = torch.tensor([2, 0, 1])  # token 2 is proposed although the target never starts with it
PROPOSAL = torch.tensor([0.4, 0.3, 0.3], dtype=torch.float64)


def _draws(purpose: Purpose) -> torch.Tensor:
    return torch.from_numpy(uniforms(np.arange(DRAWS)[:, None], np.arange(SLOTS), purpose))


def _chain(device: str) -> Verdict:
    """Many independent blocks of two drafts, each drawn from PROPOSAL, verified against the laws above."""
    proposed = CANDIDATES[
        torch.searchsorted(PROPOSAL.cumsum(0), _draws(Purpose.PROPOSE)[:, :2].contiguous(), right=True)
    ]
    probs = torch.stack((FIRST.expand(DRAWS, -1), SECOND[proposed[:, 0]], THIRD.expand(DRAWS, -1)), 1)
    inputs = (
        probs, proposed, CANDIDATES.expand(DRAWS, 2, -1), PROPOSAL.expand(DRAWS, 2, -1), _draws(Purpose.ACCEPT),
        _draws(Purpose.RESIDUAL), _draws(Purpose.TOKEN),
    )  # fmt: skip
    tokens, counts = verify_chain(*(one.to(device) for one in inputs))
    return Verdict(tokens.cpu(), counts.cpu())


def _p_value(tokens: torch.Tensor, law: torch.Tensor) -> float:
    observed = torch.bincount(tokens, minlength=VOCAB).double()
    assert not observed[law == 0].any(), "a token of zero mass was committed"
    expected = law.double() / law.double().sum() * observed.sum()
    return float(stats.chisquare(observed[law > 0], expected[law > 0]).pvalue)


@pytest.mark.parametrize("device", DEVICES)
def test_chain_rejection_commits_the_target_law(device: str) -> None:
    tokens, counts = _chain(device)
    assert _p_value(tokens[:, 0], FIRST) > 1e-4
    for first in range(VOCAB):
        again = (counts >= 2) & (tokens[:, 0] == first)
        if again.sum() > 500:
            assert _p_value(tokens[again, 1], SECOND[first]) > 1e-4
    assert _p_value(tokens[counts == 3, 2], THIRD) > 1e-4
    assert all((counts == count).sum() > 1000 for count in (1, 2, 3))


def test_a_bonus_from_p_after_a_rejection_is_wrong_and_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout.embedded.verify, "residual", lambda p, q: p)
    assert _p_value(_chain("cpu").tokens[:, 0], FIRST) < 1e-9


@pytest.mark.parametrize("device", DEVICES)
def test_target_only_draws_do_not_depend_on_the_draft(device: str) -> None:
    probs = FIRST.expand(DRAWS, SLOTS, -1).to(device)
    token = _draws(Purpose.TOKEN).to(device)
    drafted = torch.tensor([[0, 1], [3, 0]]).repeat(DRAWS // 2, 1).to(device)
    tokens, counts = (one.cpu() for one in verify_target_only(probs, drafted, token))
    assert _p_value(tokens[:, 0], FIRST) > 1e-4
    agrees = (tokens[:, :2] == drafted.cpu()).long()
    assert torch.equal(counts, 1 + agrees[:, 0] + agrees[:, 0] * agrees[:, 1])
    assert (counts == 3).any() and (counts == 1).any()


def test_a_proposal_equal_to_the_target_is_always_accepted() -> None:
    """u < 1 strictly, so u * q < p where q = p: nothing is wasted on a perfect draft."""
    law = torch.tensor([[0.25, 0.75]]).expand(4, 3, -1)
    drafted = torch.tensor([[0, 1], [1, 1], [1, 0], [0, 0]])
    highest = torch.full((4, 3), 1 - 2.0**-52, dtype=torch.float64)
    ids = torch.tensor([0, 1]).expand(4, 2, -1)
    tokens, counts = verify_chain(law, drafted, ids, law[:, :2].double(), highest, highest, highest)
    assert counts.tolist() == [3] * 4 and torch.equal(tokens[:, :2], drafted) and (tokens[:, 2] == 1).all()


def test_a_draft_without_target_mass_is_rejected_even_by_a_zero_uniform() -> None:
    probs = torch.tensor([0.0, 0.4, 0.6]).expand(1, 2, -1)
    drafted, zero = torch.tensor([[0]]), torch.zeros(1, 2, dtype=torch.float64)
    sure = torch.ones(1, 1, 1, dtype=torch.float64)
    tokens, counts = verify_chain(probs, drafted, drafted[..., None], sure, zero, zero, zero)
    assert counts.item() == 1 and tokens[0, 0] == 1


@pytest.mark.parametrize("slot", range(SLOTS))
def test_a_slot_without_a_law_commits_minus_one_and_nothing_after(slot: int) -> None:
    probs = torch.zeros(1, SLOTS, VOCAB)
    probs[..., 1] = 1.0
    probs[0, slot] = torch.nan
    drafted, half = torch.tensor([[1, 1]]), torch.full((1, SLOTS), 0.5, dtype=torch.float64)
    sure = torch.ones(1, 2, 1, dtype=torch.float64)
    chain = verify_chain(probs, drafted, drafted[..., None], sure, half, half, half)
    for tokens, counts in (chain, verify_target_only(probs, drafted, half)):
        assert counts.item() == slot + 1
        assert tokens[0, : slot + 1].tolist() == [1] * slot + [-1]
