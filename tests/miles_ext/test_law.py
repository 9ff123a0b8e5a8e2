"""The law against a plain float64 reading of its definition, and what is drawn and packed from it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from miles_ext.law import NARROW, head, invalid, law, residual, sample

CASES = json.loads((Path(__file__).parents[1] / "data" / "filters.json").read_text())


def reference(row, filter_order):
    """The definition, token by token. Returns the law and the distance of any prefix mass from top_p."""
    logits, temperature, top_k, top_p = row
    logits = [float(z) for z in logits]
    top = max(logits)
    mass = [np.exp((z - top) / temperature) for z in logits]
    kept = set(range(len(logits)))
    if 0 < top_k < len(logits):
        kth = sorted(logits, reverse=True)[top_k - 1]
        kept = {i for i, z in enumerate(logits) if z >= kth}
    margin = np.inf
    if top_p < 1:
        measured = kept if filter_order == "top_k_first" else set(range(len(logits)))
        total = sum(mass[i] for i in measured)
        nucleus = set()
        for i in measured:
            before = sum(mass[j] for j in measured if logits[j] > logits[i]) / total
            margin = min(margin, abs(before - top_p))
            if before < top_p:
                nucleus.add(i)
        # The last kept token brings its ties, and ties share what lies before them.
        kept &= nucleus
    probs = np.zeros(len(logits))
    for i in kept:
        probs[i] = mass[i] / sum(mass[j] for j in kept)
    return probs, margin


def agrees(probs, expected):
    probs = np.asarray(probs, np.float64)
    return np.array_equal(probs > 0, expected > 0) and np.abs(probs - expected).max() <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: f"{case['name']}-{case['filter_order']}")
def test_filter_cases(case, dtype):
    probs = law(
        torch.tensor([case["logits"]], dtype=dtype),
        case["temperature"], case["top_k"], case["top_p"], case["filter_order"],
    )[0]  # fmt: skip
    assert probs.dtype == dtype
    assert probs.nonzero()[:, 0].tolist() == case["support"]
    assert np.abs(probs.numpy()[case["support"]] - np.array(case["probs"])).max() <= 1e-6


@pytest.mark.parametrize("case", CASES["identities"], ids=lambda case: f"V{case['size']}")
def test_identities_keep_every_token_beside_filtered_rows(case):
    i = torch.arange(case["size"])
    row = {"-(i % 97) / 7": -(i % 97) / 7, "-(i % 251) / 11": -(i % 251) / 11}[case["logits_formula"]].float()
    temperature = torch.full((3, 1), case["temperature"])
    probs = law(row.repeat(3, 1), case["temperature"], [case["top_k"], 5, 0], [case["top_p"], 0.9, 0.5])
    assert torch.equal(probs[0], torch.softmax(row / temperature[0], -1))
    assert (probs[0] > 0).all()
    assert (probs[1:] > 0).sum() < case["size"]


grid = st.integers(-6, 6).map(lambda i: i / 2)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.lists(grid, min_size=9, max_size=9),
            st.sampled_from([0.5, 0.7, 1.0, 1.3]),
            st.integers(0, 10),
            st.sampled_from([0.05, 0.31, 0.62, 0.9, 0.97, 1.0]),
        ),
        min_size=1,
        max_size=5,
    ),
    filter_order=st.sampled_from(["top_k_first", "joint"]),
)
def test_random_ties_in_mixed_batches(rows, filter_order):
    logits, temperature, top_k, top_p = zip(*rows, strict=True)
    batch = torch.tensor(logits)
    probs = law(batch, temperature, top_k, top_p, filter_order)
    for i, row in enumerate(rows):
        expected, margin = reference(row, filter_order)
        assume(margin > 1e-9)
        assert agrees(probs[i], expected), (row, probs[i], expected)
        alone = law(batch[i : i + 1], temperature[i], top_k[i], top_p[i], filter_order)[0]
        assert torch.equal(probs[i], alone), "a row depends on its neighbours"


def test_a_dropped_tie_is_noticed():
    case = next(case for case in CASES["cases"] if case["name"] == "tie at the k cutoff")
    logits = torch.tensor([case["logits"]])
    expected, _ = reference((case["logits"], 1.0, case["top_k"], 1.0), "top_k_first")
    rank_cut = torch.full_like(logits, -torch.inf)
    values, ids = logits.topk(case["top_k"])
    rank_cut = torch.softmax(rank_cut.scatter(1, ids, values), -1)
    assert agrees(law(logits, 1.0, case["top_k"])[0], expected)
    assert not agrees(rank_cut[0], expected)


@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])  # nuclei wider and narrower than the first look
def test_nuclei_of_a_large_vocabulary(scale):
    v = 3 * NARROW
    logits = torch.randn(4, v, generator=torch.Generator().manual_seed(1)) * scale
    probs = law(logits, 0.8, [0, 50, 0, 3000], [0.9, 1.0, 0.3, 0.95])
    z = logits.double() / 0.8
    for i, (k, p) in enumerate([(v, 0.9), (50, 1.0), (v, 0.3), (3000, 0.95)]):
        mass, order = torch.softmax(z[i], -1).sort(descending=True)
        mass, order = mass[:k] / mass[:k].sum(), order[:k]
        count = int((mass.cumsum(0) - mass < p).sum())
        expected = torch.zeros(v, dtype=torch.float64)
        expected[order[:count]] = mass[:count] / mass[:count].sum()
        assert agrees(probs[i], expected.numpy())


@pytest.mark.parametrize("filter_order", ["top_k_first", "joint"])
def test_top_p_of_one_keeps_tokens_too_rare_to_move_a_sum(filter_order):
    """Beside a row that needs top-p: float64 mass reaches the total long before the last of the three."""
    logits = torch.tensor([[0.0, -45.0, -50.0, -60.0]]).repeat(2, 1)
    probs = law(logits, 1.0, [3, 3], [1.0, 0.5], filter_order)
    assert (probs > 0).tolist() == [[True, True, True, False], [True, False, False, False]]


def test_greedy_takes_the_lowest_id_among_ties_and_ignores_filters():
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 1.0]])
    probs = law(logits, [0.0, 1.0], [2, 2], [0.5, 1.0])
    assert probs[0].tolist() == [0.0, 1.0, 0.0]
    assert torch.equal(probs[1], law(logits[1:], 1.0, 2)[0])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (2, 1.0), (0, 0.5), (2, 0.5)])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_logits_make_the_row_invalid_and_only_it(bad, top_k, top_p, temperature):
    logits = torch.tensor([[0.0, 1.0, 2.0, 1.0], [0.0, bad, 2.0, 1.0], [bad] * 4, [-torch.inf] * 4])
    probs = law(logits, temperature, top_k, top_p)
    assert invalid(probs).tolist() == [False, True, True, True]
    assert probs[invalid(probs)].isnan().all()
    assert torch.equal(probs[:1], law(logits[:1], temperature, top_k, top_p))
    uniforms = torch.full((4,), 0.5, dtype=torch.float64)
    assert (sample(probs, uniforms)[1:] == -1).all()


def test_minus_infinity_is_a_forbidden_token():
    probs = law(torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf]]), 0.5, 3, 0.99)
    assert probs.tolist() == [[0.5, 0.0, 0.5, 0.0]]


def test_logits_are_left_alone_and_need_no_gradient():
    logits = torch.randn(3, 8, requires_grad=True)
    before = logits.detach().clone()
    assert not law(logits, 1.0, [0, 2, 0], [1.0, 1.0, 0.5]).requires_grad
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -0.5}, "temperature -0.5"),
        ({"temperature": [1.0, float("nan"), 1.0]}, "row 1"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_k": [1, 2]}, "3 rows"),
        ({"filter_order": "p_first"}, "p_first"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        law(torch.zeros(3, 4), **arguments)


@settings(max_examples=100, deadline=None)
@given(
    masses=st.lists(st.sampled_from([0.0, 0.0, 1e-45, 1e-30, 0.25, 1.0]), min_size=2, max_size=12),
    uniform=st.one_of(st.just(0.0), st.just(np.nextafter(1.0, 0.0)), st.floats(0, 1, exclude_max=True)),
)
def test_a_token_without_mass_is_never_drawn(masses, uniform):
    assume(sum(masses) > 0)
    probs = torch.tensor([masses])
    drawn = int(sample(probs, torch.tensor([uniform], dtype=torch.float64)))
    assert probs[0, drawn] > 0


def test_no_uniform_hits_a_gap_of_a_long_law():
    """At and around every step of the distribution function of a sparse law."""
    generator = torch.Generator().manual_seed(6)
    probs = torch.rand(4000, generator=generator) * (torch.rand(4000, generator=generator) < 0.1)
    probs = probs / probs.sum()
    steps = probs.cumsum(0, dtype=torch.float64).unique()
    steps = steps / steps[-1]
    beside = [torch.nextafter(steps, torch.full_like(steps, end)) for end in (0.0, 1.0)]
    uniforms = torch.cat([steps, *beside]).clamp(0, np.nextafter(1.0, 0.0))
    drawn = sample(probs.expand(len(uniforms), -1), uniforms)
    assert (probs[drawn] > 0).all()
    assert torch.equal(drawn.unique(), probs.nonzero()[:, 0])


def test_evenly_spread_uniforms_draw_the_law():
    probs = law(torch.randn(1, 40, generator=torch.Generator().manual_seed(2)) * 2, 0.9, 0, 0.95)
    count = 20_000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    counts = torch.bincount(sample(probs.expand(count, -1), uniforms), minlength=40)
    assert (counts / count - probs[0]).abs().max() <= 1.5 / count


def test_acceptance_and_residual_compose_to_the_target():
    generator = torch.Generator().manual_seed(3)
    p, q = (law(torch.randn(6, 30, generator=generator, dtype=torch.float64) * 2, 1.0, 9) for _ in range(2))
    accepted = torch.minimum(p, q)
    rejected = 1 - accepted.sum(-1, keepdim=True)
    assert (accepted + rejected * residual(p, q) - p).abs().max() <= 1e-15
    assert (accepted + rejected * p - p).abs().max() > 1e-2, "a bonus drawn from p must be noticed"


def test_residual_without_mass_is_the_target_and_nan_stays_nan():
    p = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    q = torch.tensor([[0.5, 0.5], [torch.nan, torch.nan]])
    bonus = residual(p, q)
    assert bonus[0].tolist() == [0.5, 0.5] and bonus.dtype == torch.float32
    assert bonus[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("v", [200, 5000])
def test_heads_equal_a_full_sort(v, dtype):
    generator = torch.Generator().manual_seed(7)
    probs = law(torch.randint(-40, 40, (9, v), generator=generator).to(dtype) / 4, 0.7)  # many ties
    for k in (1, 32, 128):
        ids, logprobs = head(probs, k)
        assert torch.equal(logprobs, probs.gather(1, ids.long()).log())
        assert torch.equal(logprobs, probs.sort(-1, descending=True).values[:, :k].log())
        assert all(len(set(row)) == k for row in ids.tolist())


def test_head_is_the_k_likeliest_with_finite_logs():
    probs = law(torch.tensor([[0.0, 3.0, 1.0, -2000.0]]))
    ids, logprobs = head(probs, 4)
    assert ids.tolist() == [[1, 2, 0, 3]] and ids.dtype == torch.int32
    assert torch.allclose(logprobs[:, :3].exp(), probs[:, [1, 2, 0]]) and logprobs.isfinite().all()
    with pytest.raises(ValueError, match="head size 5"):
        head(probs, 5)
