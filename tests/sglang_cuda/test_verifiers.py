"""sglang's two CUDA accept kernels on the plugin's law: what they commit is drawn from it and never lies outside."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_ext.law import law, sample
from miles_ext.sglang_plugin import verifier
from miles_ext.sglang_plugin.verifier import VerifyStep
from miles_ext.sglang_plugin.worker import verifier_implementation
from tests.sglang_cpu.stand_ins import request, sampling_info

pytestmark = [pytest.mark.sglang, pytest.mark.cuda, pytest.mark.usefixtures("plugin")]
BLOCK = 4
REAL_VOCABULARY = 248_320


class Verify:
    """One accept step of `rows` equal requests over one target law and one draft law a position."""

    def __init__(self, logits: Tensor, draft: Tensor, rows: int, **filters: Any) -> None:
        """logits: [block, v]. draft: [block - 1, v] probabilities."""
        self.rows, self.vocabulary = rows, logits.shape[1]
        self.info = sampling_info([request("none", **filters)] * rows, self.vocabulary, "cuda")
        self.logits = logits.cuda().repeat(rows, 1)
        self.draft = draft.cuda()
        self.law = law(logits.cuda(), *[v[:BLOCK] for v in self.info.sc_plan.repeat(BLOCK)])
        drafted = [
            sample(self.draft[j : j + 1].expand(rows, -1), torch.rand(rows, dtype=torch.float64, device="cuda"))
            for j in range(BLOCK - 1)
        ]
        self.candidates = torch.stack([torch.zeros_like(drafted[0]), *drafted], 1)

    def target_only(self) -> tuple[Tensor, Tensor]:
        from sglang.srt.speculative.dflash_utils import compute_dflash_sampling_correct_drafts_and_bonus

        accepted, bonus = compute_dflash_sampling_correct_drafts_and_bonus(
            candidates=self.candidates, next_token_logits=self.logits, sampling_info=self.info, threshold_single=1.0,
            threshold_acc=1.0,
        )  # fmt: skip
        return accepted.long(), bonus

    def chain(self) -> tuple[Tensor, Tensor]:
        from sglang.srt.speculative import dflash_worker_v2

        verifier._step = VerifyStep()
        try:
            accepted, bonus, _ = dflash_worker_v2.accept_sampling(
                candidates=self.candidates, target_logits=self.logits,
                draft_probs=self.draft.expand(self.rows, -1, -1).contiguous(), sampling_info=self.info,
                draft_input=SimpleNamespace(max_top_k=None, uniform_top_k_value=None), gamma=BLOCK - 1,
                verify_num_draft_tokens=BLOCK,
            )  # fmt: skip
        finally:
            verifier._step = None
        return accepted.long(), bonus

    def run(self, kind: str) -> tuple[Tensor, Tensor]:
        """Committed tokens [rows, block], and how many count in each row."""
        accepted, bonus = getattr(self, kind)()
        tokens = torch.cat([self.candidates[:, 1:], bonus[:, None]], 1)
        tokens.scatter_(1, accepted[:, None], bonus[:, None])
        return tokens, accepted + 1


def poor_draft(vocabulary: int) -> Tensor:
    return torch.softmax(torch.randn(BLOCK - 1, vocabulary), -1)


@pytest.mark.parametrize("kind", ["target_only", "chain"])
def test_the_kernels_are_those_that_sglang_ships(kind: Any) -> None:
    assert verifier_implementation(kind) == "production"


@pytest.mark.parametrize("kind", ["target_only", "chain"])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "top_p": 0.9}, {"top_p": 0.7, "temperature": 0.6}])
def test_each_position_is_drawn_from_the_law(kind: str, filters: dict[str, Any]) -> None:
    vocabulary, rows, rounds = 24, 4096, 30
    logits = torch.randn(BLOCK, vocabulary)
    # Half of it likes what the target likes: every position is reached, and every one is rejected at times.
    draft = (torch.softmax(3 * logits[:-1], -1) + poor_draft(vocabulary)) / 2
    step = Verify(logits, draft, rows, **filters)
    counts = torch.zeros(BLOCK, vocabulary, device="cuda", dtype=torch.float64)
    for _ in range(rounds):
        step = Verify(step.logits[:BLOCK], step.draft, rows, **filters)
        tokens, committed = step.run(kind)
        for j in range(BLOCK):
            counts[j] += torch.bincount(tokens[committed > j, j], minlength=vocabulary)
    for j in range(BLOCK):
        wanted = counts[j].sum() * step.law[j].double()
        assert counts[j][wanted == 0].sum() == 0
        inside = wanted > 5
        statistic = ((counts[j] - wanted)[inside] ** 2 / wanted[inside]).sum()
        degrees = int(inside.sum()) - 1
        assert degrees >= 1
        assert statistic < degrees + 6 * (2 * degrees) ** 0.5 + 12, f"position {j}"


@pytest.mark.parametrize("kind", ["target_only", "chain"])
def test_a_verifier_of_another_law_would_be_noticed(kind: str) -> None:
    """The control: the same statistic against a law that is off by a little."""
    vocabulary, rows = 24, 40960
    step = Verify(torch.randn(BLOCK, vocabulary), poor_draft(vocabulary), rows)
    tokens, _ = step.run(kind)
    counts = torch.bincount(tokens[:, 0], minlength=vocabulary).double()
    other = torch.softmax(step.logits[0] / 1.1, -1).double() * rows
    assert ((counts - other) ** 2 / other).sum() > 200


@pytest.mark.parametrize("kind", ["target_only", "chain"])
def test_nothing_outside_the_support_is_ever_committed(kind: str) -> None:
    """Candidates and bonus alike, with a draft that likes excluded tokens and a support of tied tokens."""
    vocabulary, rows = 1000, 4096
    logits = torch.zeros(BLOCK, vocabulary)
    logits[:, ::7] = 4.0
    for _ in range(20):
        step = Verify(logits, torch.full((BLOCK - 1, vocabulary), 1 / vocabulary), rows, top_k=3)
        assert (step.law > 0).sum(1).tolist() == [143] * BLOCK
        tokens, committed = step.run(kind)
        assert supported(step, tokens, committed).all()


@pytest.mark.parametrize("kind", ["target_only", "chain"])
@pytest.mark.parametrize("filters", [{}, {"top_k": 50, "top_p": 0.95}, {"top_p": 0.95}])
def test_a_real_vocabulary(kind: str, filters: dict[str, Any]) -> None:
    step = Verify(torch.randn(BLOCK, REAL_VOCABULARY) * 2, poor_draft(REAL_VOCABULARY), 8, **filters)
    for _ in range(50):
        tokens, committed = step.run(kind)
        assert supported(step, tokens, committed).all()
        assert (committed >= 1).all() and (committed <= BLOCK).all()


@pytest.mark.parametrize("kind", ["target_only", "chain"])
def test_the_bonus_follows_the_distribution_function_of_a_real_vocabulary(kind: str) -> None:
    """Every candidate has no mass and is rejected, so each bonus is one draw from the law of the first position."""
    logits = torch.randn(BLOCK, REAL_VOCABULARY) * 2
    logits[:, 7] = -1e4
    never = torch.nn.functional.one_hot(torch.full((BLOCK - 1,), 7), REAL_VOCABULARY).float()
    step = Verify(logits, never, 64)
    first = step.law[0].double()
    assert first[7] == 0
    places = []
    for _ in range(64):
        tokens, committed = step.run(kind)
        assert (committed == 1).all()
        bonus = tokens[:, 0]
        step_of_token = torch.rand(len(bonus), dtype=torch.float64, device="cuda") * first[bonus]
        places.append(first.cumsum(0)[bonus] - step_of_token)
    ranked = torch.cat(places).sort().values
    uniform = torch.arange(1, len(ranked) + 1, dtype=torch.float64, device="cuda") / len(ranked)
    assert (ranked - uniform).abs().max() < 2.2 / len(ranked) ** 0.5  # Kolmogorov and Smirnov, about 1e-4


def supported(step: Verify, tokens: Tensor, committed: Tensor) -> Tensor:
    inside = torch.stack([step.law[j][tokens[:, j]] > 0 for j in range(BLOCK)], 1)
    counts = torch.arange(BLOCK, device="cuda") < committed[:, None]
    return inside | ~counts
