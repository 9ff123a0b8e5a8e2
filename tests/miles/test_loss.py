"""Miles' own `loss_function` with our custom loss, against float64 and against its policy loss."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from miles_ext.errors import SupportError
from miles_ext.miles_adapter.samples import ATTRIBUTE
from miles_ext.sampling import SamplingSpec
from tests.miles.batches import VOCAB, Packed, arguments, packed, reference
from tests.miles.state import set_state

HEAD = SamplingSpec(capture="head", head_size=6)
WARM_HEAD = SamplingSpec(capture="head", head_size=6, temperature=0.7)
FILTERED = SamplingSpec(capture="complete", top_k=4, temperature=0.7)


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory):
    store = tmp_path_factory.mktemp("gloo") / "store"
    torch._dynamo.config.disable = True  # Miles compiles its policy loss: a minute for the same numbers
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    set_state()
    yield
    dist.destroy_process_group()
    torch._dynamo.config.disable = False


def args_for(spec: SamplingSpec, **changes):
    given = dict(rollout_temperature=spec.temperature, rollout_top_k=spec.top_k or -1, sc_head_size=spec.head_size)
    return arguments(**{**given, **changes})


def run(found: Packed, args):
    from miles.backends.training_utils.loss import loss_function

    found.logits.grad = None
    loss, _, log = loss_function(args, dict(found.batch), 1, found.logits)
    loss.backward()
    values = log["values"][1:].tolist()
    assert found.logits.grad is not None
    return found.logits.grad[0].double(), dict(zip(log["keys"], values, strict=True))


@pytest.mark.parametrize("spec", [HEAD, WARM_HEAD, FILTERED], ids=["head", "head-T0.7", "top_k-T0.7"])
@pytest.mark.parametrize("centering", ["on", "off"])
@pytest.mark.parametrize("mode", ["none", "tis", "mis"])
def test_gradient_is_the_float64_reference(mode, centering, spec):
    found = packed(spec)
    grad, metrics = run(found, args_for(spec, sc_mode=mode, sc_centering=centering))
    wanted = reference(found, spec, mode, centering) / 3  # Miles divides by the global batch size
    assert wanted.abs().max() > 0.02
    assert (grad - wanted).abs().max() <= 1e-6
    assert metrics["sc_sampled_in_support"] > 0 and metrics["train_rollout_logprob_abs_diff"] > 0.01
    # The reference can tell one setting from another.
    others = [(mode, "off" if centering == "on" else "on"), ("none" if mode != "none" else "tis", centering)]
    for other in others:
        assert (grad - reference(found, spec, *other) / 3).abs().max() > 1e-3, other


def test_diagnose_measures_and_applies_nothing():
    found = packed(FILTERED)
    off, plain = run(found, args_for(FILTERED, sc_centering="off"))
    diagnosed, metrics = run(found, args_for(FILTERED, sc_centering="diagnose"))
    assert torch.equal(off, diagnosed)
    assert metrics["sc_correction_norm"] > 0.01 and plain["sc_correction_norm"] == 0


@pytest.mark.parametrize("mode", ["none", "tis", "mis"])
def test_a_mean_over_tokens_is_miles_own(mode):
    found = packed(HEAD)
    grad, _ = run(found, args_for(HEAD, sc_mode=mode, calculate_per_token_loss=True))
    wanted = reference(found, HEAD, mode, "on", per_token=True)
    assert (grad - wanted).abs().max() <= 3e-6 and (grad - wanted / 3).abs().max() > 1e-2


def test_a_custom_reducer_reduces_the_loss_and_not_the_metrics():
    from miles.utils.misc import function_registry

    def tenfold(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
        return lambda x: 10 * (x * torch.cat(loss_masks)).sum()

    found = packed(HEAD)
    _, plain = run(found, args_for(HEAD))
    with function_registry.temporary("tests.tenfold", tenfold):
        grad, metrics = run(found, args_for(HEAD, custom_pg_loss_reducer_function_path="tests.tenfold"))
    assert (grad - 10 * reference(found, HEAD, "none", "on", per_token=True) / 3).abs().max() <= 3e-6
    assert {**plain, "loss": 0} == {**metrics, "loss": 0}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tis_without_centering_is_miles_policy_loss_with_tis(temperature, monkeypatch):
    """One step after the rollout the policy ratio is 1, and both weigh with min(p/q, 2)."""
    from megatron.core.fusions import fused_cross_entropy
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    spec = replace(HEAD, temperature=temperature)
    found = packed(spec, noise=1.5, shapes=((3, 9), (2, 8), (5, 3)))
    ours, metrics = run(found, args_for(spec, sc_mode="tis", sc_centering="off"))
    rounded, _ = run(found, args_for(spec, loss_type="policy_loss", use_tis=True))
    # Megatron's fused cross entropy rounds its gradient to bfloat16; its other one, which is exact, does not.
    monkeypatch.setattr(
        fused_cross_entropy, "fused_vocab_parallel_cross_entropy",
        lambda logits, target, group: vocab_parallel_cross_entropy(logits, target),
    )  # fmt: skip
    monkeypatch.setattr(parallel_state, "_TENSOR_MODEL_PARALLEL_GROUP", dist.group.WORLD)
    miles, theirs = run(found, args_for(spec, loss_type="policy_loss", use_tis=True))
    assert miles.abs().max() > 0.02 and 0 < metrics["tis_clipfrac"] < 3
    assert (ours - miles).abs().max() <= 1e-6
    assert (ours - rounded).abs().max() <= 2**-8 * miles.abs().max()
    for name in ("tis_clipfrac", "train_rollout_logprob_abs_diff"):
        assert abs(metrics[name] - theirs[name]) <= 1e-5, name
    unclipped, _ = run(found, args_for(spec, sc_mode="none", sc_centering="off"))
    assert (unclipped - miles).abs().max() > 1e-2


def test_padding_beyond_the_engines_vocabulary_gets_no_mass():
    found = packed(HEAD)
    wide = replace(found, logits=torch.nn.functional.pad(found.logits.detach(), (0, 4), value=3.0).requires_grad_())
    grad, _ = run(found, args_for(HEAD))
    padded, _ = run(wide, args_for(HEAD))
    assert (padded[:, :VOCAB] - grad).abs().max() <= 1e-7 and not padded[:, VOCAB:].any()


def test_padded_sequences():
    """qkv_format bshd: [samples, longest, vocabulary]."""
    found = packed(HEAD)
    longest, start, parts = 9, 0, []
    for total in found.batch["total_lengths"]:
        one = found.logits.detach()[0, start : start + total]
        parts.append(torch.nn.functional.pad(one, (0, 0, 0, longest - total)))
        start += total
    grid = replace(found, logits=torch.stack(parts).requires_grad_())
    grid.batch["max_seq_lens"] = [longest] * 3
    from miles.backends.training_utils.loss import loss_function

    loss, _, _ = loss_function(args_for(HEAD, qkv_format="bshd"), grid.batch, 1, grid.logits)
    loss.backward()
    found.batch.pop("max_seq_lens")
    wanted, _ = run(found, args_for(HEAD))
    totals = found.batch["total_lengths"]
    assert grid.logits.grad is not None
    got = torch.cat([one[:total] for one, total in zip(grid.logits.grad, totals, strict=True)])
    assert torch.equal(got.double(), wanted)


def test_every_micro_batch_reports_the_same_metrics():
    """Miles stacks them by position: an unlike set would be added up under wrong names."""
    from miles_ext.miles_adapter.loss import METRICS

    _, full = run(packed(HEAD), args_for(HEAD))
    none_trained = packed(HEAD, shapes=((3, 2),))
    none_trained.batch["loss_masks"] = [torch.zeros(2, dtype=torch.int)]
    grad, masked = run(none_trained, args_for(HEAD))
    _, filtered = run(packed(FILTERED), args_for(FILTERED, sc_mode="mis"))
    assert list(full) == list(masked) == list(filtered) == ["loss", "pg_loss", *METRICS]
    assert not grad.any() and all(np.isfinite(list(masked.values())))


def test_tokens_that_are_not_trained_may_have_any_advantage():
    found = packed(HEAD)
    wanted, _ = run(found, args_for(HEAD))
    for advantage, mask in zip(found.batch["advantages"], found.batch["loss_masks"], strict=True):
        advantage[mask == 0] = torch.nan
    grad, metrics = run(found, args_for(HEAD))
    assert torch.equal(grad, wanted) and all(np.isfinite(list(metrics.values())))


def test_recomputing_the_loss_function_changes_nothing():
    found = packed(HEAD)
    wanted, _ = run(found, args_for(HEAD))
    again, _ = run(found, args_for(HEAD, recompute_loss_function=True))
    assert torch.equal(again, wanted)


def refused(found: Packed, args, match: str):
    with pytest.raises(SupportError, match=match):
        run(found, args)
    assert found.logits.grad is None


def test_missing_rows():
    found = packed(HEAD)
    found.batch.pop(ATTRIBUTE)
    refused(found, args_for(HEAD), "no support rows; set --custom-megatron-init-path")


def test_rows_of_another_length_than_the_response():
    found = packed(HEAD)
    first = found.batch[ATTRIBUTE][0]
    found.batch[ATTRIBUTE][0] = replace(first, rows=first.rows[:-1])
    refused(found, args_for(HEAD), "sample 0 of a micro-batch: 4 rows .*; accepted: 5")


def test_another_temperature():
    refused(packed(WARM_HEAD), args_for(HEAD), "temperature=0.7.*accepted: 5, with .*temperature=1.0")


def test_rows_of_another_sample():
    found = packed(HEAD, shapes=((3, 4), (2, 4)))
    found.batch[ATTRIBUTE].reverse()
    refused(found, args_for(HEAD), "are of other tokens than its rollout_log_probs")
    found = packed(HEAD)
    found.batch["rollout_log_probs"] = []
    refused(found, args_for(HEAD), "no rollout_log_probs")


def test_a_model_narrower_than_the_engines_vocabulary():
    found = packed(HEAD)
    found = replace(found, logits=found.logits.detach()[..., :-1].clone().requires_grad_())
    refused(found, args_for(HEAD), "vocabulary of 20, and a model with 19 columns")
