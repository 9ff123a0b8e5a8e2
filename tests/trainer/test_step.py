from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from miles_ext.errors import TrainingError
from miles_ext.records import Status
from tests.trainer.reference import gradients
from tests.trainer.rollouts import make_rollout
from tests.trainer.test_batch import with_status
from trainer.backends.torch import TorchBackend
from trainer.config import EstimatorSettings, TrainerConfig
from trainer.objective import TOKEN_MEANS, estimator, objective
from trainer.step import micro_batches, train_step, update

LAWS = {"complete": {}, "filtered": {"top_k": 6, "top_p": 0.9}, "head": {"head_size": 8}}
SIZES = {"complete": 24, "filtered": 6, "head": 8}
TEMPERATURES = (1.0, 0.7)


@pytest.fixture(scope="module")
def rollouts(target):
    """Rollouts whose engine disagrees with the trainer, so that every weight and correction matters."""
    return {
        (law, heat): make_rollout(target, groups=3, temperature=heat, noise=0.6, seed=5, masked=True, **LAWS[law])
        for law, heat in product(LAWS, TEMPERATURES)
    }


def gradient_of(backend, rollout, values, config, temperature):
    backend.zero_grad()
    for batch in micro_batches(rollout, np.arange(len(rollout)), values, config, 0, 1):
        backend.forward_backward([batch], [objective(batch, estimator(config.estimator), temperature)])
    return {name: parameter.grad.clone() for name, parameter in backend.parameters.items()}


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert (gradient - expected[name]).norm() <= 1e-10 * expected[name].norm(), name


@pytest.fixture(scope="module")
def float64_backend(target):
    return TorchBackend(TrainerConfig(dtype="float64", chunk_tokens=5), target)


@pytest.mark.parametrize("mode", ["none", "tis", "mis"])
@pytest.mark.parametrize("centering", ["on", "off", "diagnose"])
@pytest.mark.parametrize("law", list(LAWS))
def test_the_whole_gradient_equals_plain_autograd(target, rollouts, float64_backend, mode, centering, law):
    settings = EstimatorSettings(mode=mode, centering=centering, tis_clip=1.2, mis_low=0.8, mis_high=1.4)
    for heat, reduction in product(TEMPERATURES, ("token_mean", "sequence_mean")):
        rollout = rollouts[law, heat]
        values = np.linspace(-1, 2, len(rollout))
        config = TrainerConfig(estimator=settings, reduction=reduction, micro_tokens=30)
        found = gradient_of(float64_backend, rollout, values, config, heat)
        expected = gradients(target, rollout, values, settings, heat, reduction)
        assert_close(found, expected)


def test_micro_batches_and_chunks_do_not_change_the_gradient(target, rollouts):
    rollout, values = rollouts["complete", 1.0], np.linspace(-1, 2, 6)
    whole = gradient_of(TorchBackend(TrainerConfig(dtype="float64"), target), rollout, values, TrainerConfig(), 1.0)
    small = TrainerConfig(dtype="float64", micro_tokens=1, chunk_tokens=1)
    parts = gradient_of(TorchBackend(small, target), rollout, values, small, 1.0)
    assert_close(whole, parts)


def test_padding_never_leaks(target, rollouts, float64_backend):
    rollout, values, config = rollouts["complete", 1.0], np.linspace(-1, 2, 6), TrainerConfig()
    clean = gradient_of(float64_backend, rollout, values, config, 1.0)
    (batch,) = micro_batches(rollout, np.arange(6), values, config, 0, 1)
    poisoned, padded = batch.input_ids.copy(), 0
    for line, index in zip(poisoned, dict.fromkeys(batch.trajectory.tolist()), strict=True):
        completion = rollout[index].completion
        end = len(completion.prompt_ids) + len(completion) - 1
        line[end:] = np.arange(len(line) - end) % 23 + 1
        padded += len(line) - end
    assert padded > 10
    float64_backend.zero_grad()
    loss_fn = objective(batch, estimator(config.estimator), 1.0)
    float64_backend.forward_backward([replace(batch, input_ids=poisoned)], [loss_fn])
    for name, parameter in float64_backend.parameters.items():
        if name == "model.embed_tokens.weight":  # padded positions reach no loss, so their rows get no gradient either
            assert torch.allclose(parameter.grad, clean[name], rtol=0, atol=1e-15)
        else:
            assert torch.equal(parameter.grad, clean[name]), name


def test_metrics_are_constant_in_name_and_finite(target, rollouts):
    keys = {"train/loss", "train/grad_norm", "train/lr", "train/updates", "train/skipped_updates"}
    keys |= {"rollout/untrainable_groups", *TOKEN_MEANS}
    for law, heat, centering in product(LAWS, TEMPERATURES, ("on", "off", "diagnose")):
        config = TrainerConfig.model_validate({"estimator": {"mode": "tis", "centering": centering}})
        found = train_step(TorchBackend(config, target), rollouts[law, heat], config, temperature=heat)
        assert found.keys() == keys and all(np.isfinite(value) for value in found.values())
        assert found["train/train_rollout_logprob_abs_diff"] > 0.05
        assert (found["sc/correction_norm"] > 0) == (centering != "off")
        assert found["sc/support_size"] <= SIZES[law]


def test_metrics_are_means_over_all_loss_tokens(target, rollouts):
    rollout = rollouts["complete", 1.0]
    config = TrainerConfig(lr=0.0, updates_per_rollout=3, micro_tokens=20, chunk_tokens=3)
    found = train_step(TorchBackend(config, target), rollout, config, temperature=1.0)
    whole = TrainerConfig(lr=0.0, updates_per_rollout=1)
    once = train_step(TorchBackend(whole, target), rollout, whole, temperature=1.0)
    for name in TOKEN_MEANS:
        assert np.isclose(found[name], once[name], rtol=1e-5), name
    assert (found["train/updates"], once["train/updates"]) == (3, 1)


def test_the_correction_wakes_with_the_second_update(target, rollout):
    config = TrainerConfig(lr=3e-3)
    backend = TorchBackend(config, target)
    values = np.array([1.0, -1.0] * 4)
    norms = []
    for part in (np.arange(4), np.arange(4, 8)):
        batches = micro_batches(rollout, part, values, config, 0, 1)
        found = update(backend, batches, config, 1.0)
        norms.append(found["sc/correction_norm"] / found["tokens"])
    assert norms[0] < 1e-5 < 1e-2 < norms[1]


def test_a_bad_group_takes_no_part(target, rollout):
    config = TrainerConfig(content_failure="drop_group")
    bad = [with_status(rollout[0], 0, Status.OVERFLOW), *rollout[1:]]
    dropped, without = TorchBackend(config, target), TorchBackend(config, target)
    found = train_step(dropped, bad, config, temperature=1.0)
    expected = train_step(without, rollout[2:], config, temperature=1.0)
    assert found.pop("rollout/untrainable_groups") == 1 and expected.pop("rollout/untrainable_groups") == 0
    assert found == expected
    for (name, one), (_, other) in zip(dropped.export_hf(), without.export_hf(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("where", ["weights", "advantage"])
def test_non_finite_numbers_stop_before_the_weights_are_touched(target, rollout, where):
    config = TrainerConfig()
    backend = TorchBackend(config, target)
    values = np.ones(8)
    if where == "weights":
        with torch.no_grad():
            backend.parameters["model.layers.1.mlp.up_proj.weight"][3, 2] = torch.nan
    else:
        values[2] = np.inf
    before = {name: tensor.clone() for name, tensor in backend.export_hf()}
    batches = micro_batches(rollout, np.arange(8), values, config, 0, 1)
    with pytest.raises(TrainingError, match=r"update 1: loss .*gradients of \d+ parameters \['model") as caught:
        update(backend, batches, config, 1.0)
    assert "train/pg_loss" in str(caught.value) and backend.updates == 0
    for name, tensor in backend.export_hf():
        assert torch.equal(tensor, before[name]) or tensor.isnan().any()
    assert all(parameter.grad is None for parameter in backend.parameters.values())


def test_a_non_finite_gradient_behind_a_finite_loss_is_refused(target, rollout):
    config = TrainerConfig()
    backend = TorchBackend(config, target)
    backend.parameters["model.norm.weight"].register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(TrainingError, match=r"no loss, gradients of 1 parameters \['model.norm.weight'\]"):
        train_step(backend, rollout, config, temperature=1.0)


def test_temperature_zero_is_refused(target, rollout):
    with pytest.raises(ValueError, match="temperature is 0"):
        train_step(TorchBackend(TrainerConfig(), target), rollout, TrainerConfig(), temperature=0)


def test_warmup_and_clipping(target, rollout):
    config = TrainerConfig(warmup_steps=4, lr=1e-3, max_grad_norm=1e-3)
    backend = TorchBackend(config, target)
    rates = [train_step(backend, rollout, config, temperature=1.0)["train/lr"] for _ in range(3)]
    assert np.allclose(rates, [5e-4, 1e-3, 1e-3])
    moments = [backend.optimizer.state[parameter]["exp_avg"] for parameter in backend.parameters.values()]
    assert torch.nn.utils.get_total_norm(moments) <= 1e-3
