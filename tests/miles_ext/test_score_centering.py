"""The estimator against an independent float64 enumeration of its definition."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_ext.score_centering import EstimatorConfig, SupportTensors, score_centered_loss

CASES = json.loads((Path(__file__).parents[1] / "data" / "estimator.json").read_text())["cases"]
MODES = ("none", "tis", "mis")
METRICS = {
    "logprob", "logprob_gap", "weight", "weight_clipped", "support_mass_q", "support_mass_p", "tail_ratio",
    "tail_ratio_bounded", "support_size", "sampled_in_support", "pg_loss", "correction_loss", "correction_norm",
    "correction_tail",
}  # fmt: skip


def softmax(z):
    e = np.exp(z - z.max())
    return e / e.sum()


def weight(r, cfg):
    return {"none": 1.0, "tis": min(r, cfg.tis_clip), "mis": r if cfg.mis_low <= r <= cfg.mis_high else 0.0}[cfg.mode]


def reference_gradient(z, temperature, row, kind, advantage, cfg):
    """dL/dz from the definition: dense laws, scores as one-hot minus p, the mean over q's model written out."""
    sampled, lq_sampled, ids, lq = row
    z, q = np.asarray(z, np.float64) / temperature, np.exp(np.asarray(lq, np.float64))
    p = np.zeros(len(z))
    if kind == "complete":
        p[ids] = softmax(z[ids])
    else:
        p = softmax(z)
    mass = np.zeros(len(z))
    for v, q_v in zip(ids, q, strict=True):
        mass[v] = q_v * weight(p[v] / q_v, cfg)
    if kind == "head":
        off = np.setdiff1d(np.arange(len(z)), ids)
        rho = min((1 - q.sum()) / (1 - p[ids].sum()), cfg.rho_max)
        mass[off] = rho * p[off] * weight(1 / rho, cfg)
    score_mean = mass - mass.sum() * p
    own = -p
    own[sampled] += 1
    own = own * weight(math.exp(math.log(p[sampled]) - lq_sampled), cfg)
    return -advantage / temperature * (own - (score_mean if cfg.centering == "on" else 0))


def supports(ids, lq, sampled, lq_sampled, kind):
    """Rows from lists of equal or unequal length."""
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in ids])])
    return SupportTensors.from_arrays(
        np.concatenate([np.asarray(row, np.int64) for row in ids]),
        np.concatenate([np.asarray(row, np.float64) for row in lq]),
        offsets, np.asarray(sampled, np.int64), np.asarray(lq_sampled, np.float64), kind,
    )  # fmt: skip


def gradient(z, support, advantages, cfg, temperature=1.0):
    logits = torch.as_tensor(z).detach().clone().requires_grad_()
    loss, metrics = score_centered_loss(logits, support, torch.as_tensor(advantages), cfg, temperature)
    loss.sum().backward()
    assert logits.grad is not None
    return logits.grad, loss.detach(), metrics


@dataclasses.dataclass
class Batch:
    """Tokens with their laws: q is the trainer's law with noise, recorded as a filtered support or as a head."""

    z: torch.Tensor
    q: np.ndarray
    support: SupportTensors
    rows: list
    advantages: torch.Tensor

    @classmethod
    def draw(cls, kind, n=6, v=60, size=12, temperature=1.0, noise=0.6, seed=0, ragged=False):
        rng = np.random.default_rng(seed)
        z = rng.normal(size=(n, v)) * 2
        q = np.stack([softmax((row + noise * rng.normal(size=v)) / temperature) for row in z])
        rows, full = [], q.copy()
        for i in range(n):
            ids = np.argsort(-q[i])[: size - (i % 3 if ragged else 0)]
            if kind == "complete":
                full[i] = 0
                full[i, ids] = q[i, ids] / q[i, ids].sum()
            sampled = rng.choice(v, p=full[i])
            rows.append((sampled, np.log(full[i, sampled]), ids, np.log(full[i, ids])))
        support = supports([r[2] for r in rows], [r[3] for r in rows], [r[0] for r in rows], [r[1] for r in rows], kind)
        return cls(torch.tensor(z), full, support, rows, torch.tensor(rng.normal(size=n)))

    def reference(self, cfg, kind, temperature=1.0):
        return np.stack([
            reference_gradient(self.z[i], temperature, self.rows[i], kind, float(self.advantages[i]), cfg)
            for i in range(len(self.rows))
        ])  # fmt: skip


@pytest.mark.parametrize("index", range(len(CASES)))
@pytest.mark.parametrize(
    ("centering", "key"),
    [("on", "logit_grad_centered"), ("off", "logit_grad_uncentered"), ("diagnose", "logit_grad_uncentered")],
)
def test_cases(index, centering, key):
    case = CASES[index]
    low, high = case["mis_bounds"]
    cfg = EstimatorConfig(case["mode"], centering, tis_clip=case["tis_clip"], mis_low=low, mis_high=high)
    support = supports(
        [case["support_ids"]], [case["support_logprobs"]], [case["sampled"]], [case["sampled_logprob"]], case["kind"]
    )
    z = torch.tensor([case["logits"]], dtype=torch.float64)
    found, *_ = gradient(z, support, [case["advantage"]], cfg, case["temperature"])
    assert np.abs(found[0].numpy() - np.array(case[key])).max() <= 1e-12


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["complete", "head"]),
    mode=st.sampled_from(MODES),
    centering=st.sampled_from(["on", "off"]),
    temperature=st.sampled_from([0.7, 1.0, 1.6]),
    noise=st.sampled_from([0.0, 0.3, 1.5]),
    ragged=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_closed_form_equals_the_definition(kind, mode, centering, temperature, noise, ragged, seed):
    cfg = EstimatorConfig(mode, centering)
    batch = Batch.draw(kind, temperature=temperature, noise=noise, seed=seed, ragged=ragged)
    found, *_ = gradient(batch.z, batch.support, batch.advantages, cfg, temperature)
    assert np.abs(found.numpy() - batch.reference(cfg, kind, temperature)).max() <= 1e-12


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["complete", "head"])
def test_closed_form_equals_autograd_of_the_surrogate(kind, mode):
    """-A [w log p_y - sum c log p_v] with plain log_softmax, every factor a constant computed here."""
    cfg, batch, temperature = EstimatorConfig(mode), Batch.draw(kind, seed=5), 0.8
    found, loss, _ = gradient(batch.z, batch.support, batch.advantages, cfg, temperature)
    z = batch.z.clone().requires_grad_()
    total, values = torch.zeros((), dtype=torch.float64), []
    for i, (sampled, lq_sampled, ids, lq) in enumerate(batch.rows):
        scaled = z[i] / temperature
        if kind == "complete":
            outside = torch.ones(len(scaled), dtype=torch.bool)
            outside[ids] = False
            scaled = scaled.masked_fill(outside, -torch.inf)
        lp = scaled.log_softmax(-1)
        p, q = lp.detach().exp().numpy(), np.exp(lq)
        c = np.array([q_v * weight(p[v] / q_v, cfg) for v, q_v in zip(ids, q, strict=True)])
        if kind == "head":
            rho = (1 - q.sum()) / (1 - p[ids].sum())
            c = c - rho * weight(1 / rho, cfg) * p[ids]
        w = weight(p[sampled] / math.exp(lq_sampled), cfg)
        value = -batch.advantages[i] * (w * lp[sampled] - (torch.tensor(c) * lp[ids]).sum())
        values.append(value.detach())
        total = total + value
    total.backward()
    assert z.grad is not None
    assert (z.grad - found).abs().max() <= 1e-12
    assert (torch.stack(values) - loss).abs().max() <= 1e-12


def expected_gradient(batch, kind, cfg, temperature=1.0, advantage=1.3):
    """E_q of the gradient at the batch's first token, by running every token of the vocabulary as the sampled one."""
    _, _, ids, lq = batch.rows[0]
    drawn = np.flatnonzero(batch.q[0])
    q = batch.q[0][drawn]
    n = len(drawn)
    support = supports([ids] * n, [lq] * n, drawn, np.log(q), kind)
    found, *_ = gradient(batch.z[:1].expand(n, -1), support, np.full(n, advantage), cfg, temperature)
    return q @ found.numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [12, 60])  # filtered, and unfiltered with the whole vocabulary recorded
def test_centering_is_exact_on_complete_supports(size, mode, temperature):
    batch = Batch.draw("complete", n=1, size=size, temperature=temperature, noise=1.0, seed=7)
    on = expected_gradient(batch, "complete", EstimatorConfig(mode), temperature)
    off = expected_gradient(batch, "complete", EstimatorConfig(mode, "off"), temperature)
    assert np.abs(on).max() <= 1e-14
    assert np.abs(off).sum() > 0.02, "the control must show the drift that centering removes"


@pytest.mark.parametrize("mode", MODES)
def test_centering_leaves_the_predicted_residual_on_heads(mode):
    temperature, advantage, cfg = 0.9, 1.3, EstimatorConfig(mode)
    batch = Batch.draw("head", n=1, size=20, temperature=temperature, noise=1.0, seed=8)
    p, q, ids = softmax(batch.z[0].numpy() / temperature), batch.q[0], batch.rows[0][2]
    off = np.setdiff1d(np.arange(len(p)), ids)
    rho = q[off].sum() / p[off].sum()
    surplus = np.array([q[v] * weight(p[v] / q[v], cfg) for v in off]) - rho * weight(1 / rho, cfg) * p[off]
    residual = -surplus.sum() * p
    residual[off] += surplus
    found = expected_gradient(batch, "head", cfg, temperature, advantage)
    assert np.abs(found + advantage / temperature * residual).max() <= 1e-12
    if mode == "none":
        tail_distance = np.abs(q[off] / q[off].sum() - p[off] / p[off].sum()).sum()
        assert np.abs(residual).sum() == pytest.approx(q[off].sum() * tail_distance, abs=1e-12)
    assert np.abs(found - expected_gradient(batch, "head", EstimatorConfig(mode, "off"), temperature)).sum() > 1e-3


def test_on_policy_heads_need_no_correction():
    batch = Batch.draw("head", noise=0.0, seed=9)
    for mode in MODES:
        *_, metrics = gradient(batch.z, batch.support, batch.advantages, EstimatorConfig(mode))
        assert metrics["correction_norm"].max() <= 1e-12 and metrics["correction_tail"].max() <= 1e-12


@pytest.mark.parametrize("kind", ["complete", "head"])
@pytest.mark.parametrize("mode", MODES)
def test_diagnose_measures_what_on_applies_and_applies_nothing(mode, kind):
    batch = Batch.draw(kind, seed=10)
    runs = {
        centering: gradient(batch.z.float(), batch.support, batch.advantages, EstimatorConfig(mode, centering), 0.8)
        for centering in ("on", "off", "diagnose")
    }
    assert torch.equal(runs["diagnose"][0], runs["off"][0])
    assert torch.equal(runs["diagnose"][1], runs["off"][1])
    assert not torch.equal(runs["on"][0], runs["off"][0])
    for name in METRICS:
        assert torch.equal(runs["diagnose"][2][name], runs["on"][2][name]), name
    assert (runs["off"][2]["correction_norm"] == 0).all()
    assert torch.equal(runs["on"][1], runs["on"][2]["pg_loss"] + runs["on"][2]["correction_loss"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["complete", "head"])
def test_correction_norm_is_that_of_the_gradient_which_centering_adds(kind, mode):
    batch, temperature = Batch.draw(kind, noise=1.5, seed=11), 0.7
    on, _, metrics = gradient(batch.z, batch.support, batch.advantages, EstimatorConfig(mode), temperature)
    off, *_ = gradient(batch.z, batch.support, batch.advantages, EstimatorConfig(mode, "off"), temperature)
    true = (on - off).norm(dim=-1)
    low, tail = metrics["correction_norm"], metrics["correction_tail"]
    assert (low <= true + 1e-12).all()
    assert (true <= (low**2 + tail**2).sqrt() + 1e-12).all()
    if kind == "complete":
        assert (tail <= 1e-12).all() and (low - true).abs().max() <= 1e-12


def test_metrics_have_constant_keys_and_right_values():
    for kind in ("complete", "head"):
        batch = Batch.draw(kind, seed=12)
        for mode in MODES:
            for centering in ("on", "off", "diagnose"):
                *_, metrics = gradient(batch.z, batch.support, batch.advantages, EstimatorConfig(mode, centering))
                assert set(metrics) == METRICS
                assert all(m.shape == (6,) and m.isfinite().all() and not m.requires_grad for m in metrics.values())
    batch = Batch.draw("head", seed=12)
    *_, metrics = gradient(batch.z, batch.support, batch.advantages, EstimatorConfig("tis", tis_clip=1.1))
    for i, (sampled, lq_sampled, ids, lq) in enumerate(batch.rows):
        p = softmax(batch.z[i].numpy())
        ratio = p[sampled] / np.exp(lq_sampled)
        assert metrics["logprob"][i] == pytest.approx(np.log(p[sampled]))
        assert metrics["logprob_gap"][i] == pytest.approx(abs(np.log(ratio)))
        assert metrics["weight"][i] == pytest.approx(min(ratio, 1.1))
        assert metrics["weight_clipped"][i] == (ratio > 1.1)
        assert metrics["support_mass_p"][i] == pytest.approx(p[ids].sum())
        assert metrics["support_mass_q"][i] == pytest.approx(np.exp(lq).sum())
        assert metrics["tail_ratio"][i] == pytest.approx((1 - np.exp(lq).sum()) / (1 - p[ids].sum()))
        assert metrics["support_size"][i] == 12
        assert metrics["sampled_in_support"][i] == (sampled in ids)


@pytest.mark.parametrize("kind", ["complete", "head"])
def test_entropy_on_request(kind):
    batch = Batch.draw(kind, seed=13)
    *_, metrics = gradient(batch.z, batch.support, batch.advantages, EstimatorConfig(entropy=True), 0.8)
    assert set(metrics) == METRICS | {"entropy"}
    for i, (_, _, ids, _) in enumerate(batch.rows):
        z = batch.z[i].numpy() / 0.8
        p = softmax(z[ids] if kind == "complete" else z)
        assert metrics["entropy"][i] == pytest.approx(-(p * np.log(p)).sum(), abs=1e-12)


def test_complete_supports_touch_their_entries_only():
    batch = Batch.draw("complete", seed=14, ragged=True)
    found, *_ = gradient(batch.z, batch.support, batch.advantages, EstimatorConfig("tis"))
    for i, (_, _, ids, _) in enumerate(batch.rows):
        assert (found[i, np.setdiff1d(np.arange(60), ids)] == 0).all()
        assert abs(float(found[i].sum())) <= 1e-15


def test_each_token_may_have_its_own_temperature_and_upstream_factor():
    batch, cfg = Batch.draw("head", seed=15), EstimatorConfig("tis")
    temperature = torch.tensor([0.5, 0.7, 1.0, 1.3, 2.0, 1.0], dtype=torch.float64)
    factor = torch.tensor([0.0, 1.0, 2.0, 0.5, 1.0, 0.0], dtype=torch.float64)
    z = batch.z.clone().requires_grad_()
    loss, metrics = score_centered_loss(z, batch.support, batch.advantages, cfg, temperature)
    (loss * factor).sum().backward()
    assert z.grad is not None
    for i in range(6):
        expected = reference_gradient(
            batch.z[i], float(temperature[i]), batch.rows[i], "head", float(batch.advantages[i]), cfg
        )
        assert np.abs(z.grad[i].numpy() - float(factor[i]) * expected).max() <= 1e-12


def kept_for_backward(build):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        build()
    return kept


@pytest.mark.parametrize("kind", ["complete", "head"])
def test_backward_keeps_nothing_of_the_size_of_the_logits_but_the_logits(kind):
    batch = Batch.draw(kind, n=4, v=5000, size=8, seed=16)
    z = batch.z.float().requires_grad_()

    def others(build):
        limit = z.untyped_storage().nbytes() / 10
        large = [t.untyped_storage() for t in kept_for_backward(build) if t.untyped_storage().nbytes() >= limit]
        return [storage for storage in large if storage.data_ptr() != z.untyped_storage().data_ptr()]

    assert not others(lambda: score_centered_loss(z, batch.support, batch.advantages, EstimatorConfig("tis")))
    assert others(lambda: z.log_softmax(-1)), "the probe must see the naive buffer"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["complete", "head"])
def test_float32_is_accurate_and_bfloat16_rounds_once(kind, mode):
    batch, cfg = Batch.draw(kind, n=8, v=4000, size=64, seed=17), EstimatorConfig(mode)
    exact, *_ = gradient(batch.z, batch.support, batch.advantages, cfg, 0.7)
    single, *_ = gradient(batch.z.float(), batch.support, batch.advantages, cfg, 0.7)
    assert single.dtype == torch.float32
    assert (single - exact).abs().sum(-1).max() <= 2e-5
    coarse = batch.z.bfloat16()
    of_coarse, *_ = gradient(coarse.double(), batch.support, batch.advantages, cfg, 0.7)
    half, loss, _ = gradient(coarse, batch.support, batch.advantages, cfg, 0.7)
    assert half.dtype == torch.bfloat16 and loss.dtype == torch.float32
    assert ((half.double() - of_coarse).abs() <= 2**-8 * of_coarse.abs() + 2e-6).all()


def test_bfloat16_keeps_the_small_gradient_of_a_likely_token():
    """At p_y = 1 - 6e-4 the two terms of z_y nearly cancel; rounded apart, they would cancel to zero."""
    z = torch.zeros(1, 50)
    z[0, 7] = 11.25
    support = supports([[7, 1]], [[math.log(0.9), math.log(0.05)]], [7], [math.log(0.9)], "head")
    cfg = EstimatorConfig(centering="off")
    exact, *_ = gradient(z.double(), support, [1.0], cfg)
    half, *_ = gradient(z.bfloat16(), support, [1.0], cfg)
    assert abs(float(exact[0, 7])) < 1e-3
    assert float(half[0, 7]) == pytest.approx(float(exact[0, 7]), rel=2**-8)


def test_a_head_that_holds_nearly_all_mass_stays_finite_in_float32():
    """True tails are 1e-9 and 3e-8; float32 sees rounding there, and the floor must make it harmless."""
    v, ids = 200, np.arange(8)
    z = np.full(v, -25.0)
    z[:8] = np.log(np.array([0.5, 0.2, 0.1, 0.08, 0.05, 0.04, 0.02, 0.01]))
    lq = np.log(np.array([0.45, 0.22, 0.12, 0.08, 0.06, 0.04, 0.02, 0.01 - 1e-9]))
    for tilt in (0.0, 1e-7, -1e-7, 3e-7, -3e-7):
        row = torch.tensor(z + tilt * np.arange(v))[None]
        support = supports([ids], [lq], [1], [lq[1]], "head")
        for mode in MODES:
            exact, *_ = gradient(row, support, [1.0], EstimatorConfig(mode, rho_max=1e9))
            single, _, metrics = gradient(row.float(), support, [1.0], EstimatorConfig(mode))
            assert metrics["tail_ratio"].isfinite().all() and (metrics["tail_ratio"] > 0).all()
            assert (single - exact).abs().sum() <= 2e-5


def test_a_vanishing_trainer_tail_is_bounded_and_counted():
    z = torch.full((1, 40), -30.0)
    z[0, :4] = 0
    support = supports([range(4)], [[math.log(0.2)] * 4], [0], [math.log(0.2)], "head")
    found, _, metrics = gradient(z, support, [1.0], EstimatorConfig())
    assert metrics["tail_ratio"].tolist() == [10.0] and metrics["tail_ratio_bounded"].tolist() == [1.0]
    assert found.isfinite().all()


def test_no_sum_of_float32_probabilities_makes_a_tail_negative():
    """Heads that hold everything: their float32 sums scatter on both sides of one."""
    rng, n, size = np.random.default_rng(21), 200, 64
    z = np.full((n, 80), -40.0)
    z[:, :size] = rng.normal(size=(n, size)) * 3
    lq = [np.log(softmax(row[:size])) for row in z]
    support = supports([range(size)] * n, lq, [0] * n, [row[0] for row in lq], "head")
    exact, *_ = gradient(torch.tensor(z), support, np.ones(n), EstimatorConfig(rho_max=1e9))
    single, _, metrics = gradient(torch.tensor(z).float(), support, np.ones(n), EstimatorConfig())
    assert (metrics["support_mass_p"] > 1).any() and (metrics["support_mass_p"] < 1).any()
    assert (metrics["tail_ratio"] > 0).all()
    assert (single - exact).abs().sum(-1).max() <= 2e-5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["complete", "head"])
def test_extreme_laws_give_no_nan(kind, mode):
    """q without mass, p without mass, a ratio beyond the type, a forbidden logit."""
    z = torch.zeros(3, 6, dtype=torch.float64)
    z[0, 1] = -torch.inf
    z[1, 2] = 400.0
    no = -np.inf
    lq = [np.log([0.4, 0.3, 0.2, 0.1]), [math.log(0.5), math.log(0.5), -800.0, -900.0], [0.0, no, no, no]]
    support = supports([range(4)] * 3, lq, [0, 2, 0], [math.log(0.4), -800.0, 0.0], kind)
    found, loss, metrics = gradient(z, support, [1.0, 1.0, 0.0], EstimatorConfig(mode, entropy=True))
    assert found.isfinite().all()
    # In mode none the q-expected log p of a token without mass under p is truly -inf; the other modes drop it.
    assert not loss.isnan().any() and loss.isinf().tolist() == [mode == "none", False, False]
    assert all(values.isfinite().all() for name, values in metrics.items() if name != "correction_loss")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["complete", "head"])
def test_tokens_without_a_recorded_law_are_left_out(kind, mode):
    """Whatever stands in their place: NaN logprobs, an empty row, a NaN advantage."""
    batch, cfg = Batch.draw(kind, n=2, seed=18), EstimatorConfig(mode)
    sampled, lq_sampled, ids, lq = batch.rows[0]
    padded = supports([ids, []], [lq, []], [sampled, 0], [lq_sampled, np.nan], kind)
    found, loss, metrics = gradient(batch.z, padded, [1.0, np.nan], cfg)
    assert np.abs(found[0].numpy() - reference_gradient(batch.z[0], 1.0, batch.rows[0], kind, 1.0, cfg)).max() <= 1e-12
    assert (found[1] == 0).all() and loss[1] == 0
    assert all(values.isfinite().all() for values in metrics.values())
    assert metrics["support_size"].tolist() == [12.0, 0.0]


def test_an_empty_head_is_plain_policy_gradient_and_an_empty_support_nothing():
    z = Batch.draw("head", n=2, seed=19).z
    bare = supports([[], []], [[], []], [3, 4], [-1.0, -2.0], "head")
    found, *_ = gradient(z, bare, [1.0, -2.0], EstimatorConfig())
    p = torch.softmax(z, -1)
    p[[0, 1], [3, 4]] -= 1
    assert (found - torch.tensor([[1.0], [-2.0]]) * p).abs().max() <= 1e-15
    found, loss, _ = gradient(z, dataclasses.replace(bare, kind="complete"), [1.0, -2.0], EstimatorConfig())
    assert (found == 0).all() and (loss == 0).all()


def test_no_tokens():
    ids, numbers = np.zeros(0, np.int64), np.zeros(0)
    for kind in ("complete", "head"):
        empty = SupportTensors.from_arrays(ids, numbers, np.zeros(1, np.int64), ids, numbers, kind)
        found, loss, _ = gradient(torch.zeros(0, 9), empty, numbers, EstimatorConfig())
        assert len(empty) == 0 and found.shape == (0, 9) and loss.shape == (0,)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"mode": "ppo"}, "mode 'ppo'"),
        ({"centering": "yes"}, "centering 'yes'"),
        ({"tis_clip": 0.0}, "tis_clip 0.0"),
        ({"rho_max": -1.0}, "rho_max -1.0"),
        ({"mis_low": 6.0}, r"\[6.0, 5.0\]"),
        ({"tail_floor": 1.0}, "tail_floor 1.0"),
    ],
)
def test_bad_settings_are_named(settings_, message):
    with pytest.raises(ValueError, match=message):
        EstimatorConfig(**settings_)


def test_arrays_that_disagree_are_refused():
    ok = {
        "token_ids": np.zeros(2, np.int32), "logprobs": np.zeros(2, np.float32), "offsets": np.array([0, 1, 2]),
        "sampled": np.zeros(2), "sampled_logprobs": np.zeros(2), "kind": "head",
    }  # fmt: skip
    assert len(SupportTensors.from_arrays(**ok)) == 2
    for change, message in [
        ({"sampled": np.zeros(3)}, "3 sampled ids"),
        ({"logprobs": np.zeros(1)}, "1 logprobs"),
        ({"offsets": np.array([0, 2, 1])}, "offsets"),
        ({"kind": "top"}, "kind 'top'"),
    ]:
        with pytest.raises(ValueError, match=message):
            SupportTensors.from_arrays(**(ok | change))
