"""The megatron backend in groups of processes against the torch backend in this one: same files, same rollouts."""

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.multiprocessing.spawn import spawn

from tests.trainer import megatron_ranks, rollouts
from tests.trainer.megatron_ranks import FOUR, TEMPERATURE, TWO, Case, outcome
from tests.trainer.test_ranks import free_ports
from trainer.backends.torch import TorchBackend
from trainer.config import TrainerConfig

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.timeout(600)]  # six processes; a minute when alone
CASES = TWO | FOUR
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
UNEVEN = 23  # tokens of the vocabulary that two ranks cannot share without padding


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("targets")
    return {
        "padded": rollouts.make_model(folder / "padded", vocab=UNEVEN, **HEADS),
        "tied": rollouts.make_model(folder / "tied", layers=4, seed=1, **HEADS),
        "untied": rollouts.make_model(folder / "untied", seed=2, tie_word_embeddings=False, **HEADS),
        "narrow": rollouts.make_model(folder / "narrow", seed=4),  # two heads share a key and a value
        "llama": rollouts.make_llama(folder / "llama", seed=3, num_attention_heads=4, num_key_value_heads=2),
    }


@pytest.fixture(scope="module")
def data(targets):
    """Rollouts of each model whose engine disagrees with the trainer, so that every weight and correction matters."""
    made = {}
    for name, target in targets.items():
        settings = {"temperature": TEMPERATURE, "noise": 0.4, "masked": True}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rollouts, "VOCAB", UNEVEN if name == "padded" else rollouts.VOCAB)
            made[name] = {
                "complete": rollouts.make_rollout(target, groups=3, seed=5, **settings),
                "head": rollouts.make_rollout(target, groups=2, samples=3, seed=6, head_size=6, **settings),
            }
    return made


@pytest.fixture(scope="module")
def outcomes(targets, data, tmp_path_factory):
    """What rank 0 of each case left, and the folder it was left in."""
    folder = tmp_path_factory.mktemp("ranks")
    for world, cases in ((2, TWO), (4, FOUR)):
        for name in cases:
            (folder / name).mkdir()
        spawn(megatron_ranks.main, (world, free_ports(1), targets, data, folder), nprocs=world)
    return {name: torch.load(folder / f"{name}.pt") for name in CASES}, folder


@pytest.fixture(scope="module")
def reference(targets, data, tmp_path_factory):
    """What the torch backend makes of a case."""
    known = {}

    def find(case: Case):
        key = (case.model, case.dtype, case.laws, case.modes, case.steps, str(case.changes))
        if key not in known:
            folder = tmp_path_factory.mktemp("torch")
            config = TrainerConfig(**case.config(1).model_dump())
            backend = TorchBackend(config, targets[case.model])
            if case.dtype == "float64":
                unrounded_norms(backend)
            alone = Case(case.model, dtype=case.dtype, laws=case.laws, modes=case.modes, steps=case.steps)
            known[key] = outcome(alone, config, backend, data[case.model], folder), folder
        return known[key]

    return find


def unrounded_norms(backend):
    """transformers' RMSNorm computes in float32 whatever its input; a comparison in float64 needs one that does not."""
    for module in list(backend.model.modules()):
        for name, norm in list(module.named_children()):
            if type(norm).__name__.endswith("RMSNorm"):
                same = nn.RMSNorm(len(norm.weight), norm.variance_epsilon, dtype=torch.float64)
                same.weight = norm.weight
                setattr(module, name, same)


@pytest.fixture(scope="module")
def measured():
    """Largest differences found, by case and quantity; `pytest -s` prints them."""
    table: dict[str, dict[str, float]] = {}
    yield table
    for name, found in table.items():
        print(f"\n{name:18}", *(f"{what} {value:.1e}" for what, value in found.items()), end="")


def apart(found, expected):
    """Largest difference, in units of the largest expected entry."""
    assert found.shape == expected.shape
    found, expected = found.double(), expected.double()
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_weights_come_back_bit_for_bit(targets, outcomes, name):
    stored = load_file(targets[CASES[name].model] / "model.safetensors")
    dtype = getattr(torch, CASES[name].dtype)
    initial = outcomes[0][name]["initial"]
    assert initial.keys() == stored.keys() and stored
    assert all(torch.equal(initial[key], stored[key].to(dtype)) for key in stored)


@pytest.mark.parametrize(
    ("name", "law", "mode"),
    [(name, law, mode) for name, case in CASES.items() for law in case.laws for mode in case.modes],
)
def test_logits_laws_and_gradients_are_those_of_torch(outcomes, reference, measured, name, law, mode):
    case = CASES[name]
    found, expected = outcomes[0][name][law, mode], reference(case)[0][law, mode]
    bound = 1e-12 if case.dtype == "float64" else 1e-5
    order = {place: row for row, place in enumerate(map(tuple, expected["places"].T.tolist()))}
    rows = [order[place] for place in map(tuple, found["places"].T.tolist())]
    everything = (4 if name in FOUR else 2) == case.tp * case.pp  # else data rank 0 scores its share
    assert 5 < len(rows) <= len(order) and everything == (len(rows) == len(order))
    (sampled, support, lse), (its_sampled, its_support, its_lse) = found["support"], expected["support"]
    here = {
        "logits": apart(found["logits"], expected["logits"][rows]),
        "laws": max(apart(sampled, its_sampled[rows]), apart(lse, its_lse[rows])),
        "norm": abs(found["norm"] / expected["norm"] - 1),
    }
    if everything:
        here["laws"] = max(here["laws"], apart(support.sort().values, its_support.sort().values))
    assert found["gradients"].keys() == expected["gradients"].keys()
    assert all(gradient.abs().max() > 1e-4 for gradient in expected["gradients"].values())
    each = {key: apart(found["gradients"][key], gradient) for key, gradient in expected["gradients"].items()}
    here["gradients"] = max(each.values())
    seen = measured.setdefault(name, {})
    seen.update({what: max(value, seen.get(what, 0.0)) for what, value in here.items()})
    assert max(here.values()) < bound, (here, max(each, key=each.__getitem__))
    assert torch.allclose(found["sums"], expected["sums"], rtol=bound, atol=bound)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.steps and case.dtype == "float32"])
def test_three_updates_are_those_of_torch(outcomes, reference, measured, name):
    found, (expected, _) = outcomes[0][name], reference(CASES[name])
    bound = 1e-6 if "eps" in name else 1e-4
    each = {key: float((found["trained"][key] - weight).abs().max()) for key, weight in expected["trained"].items()}
    measured.setdefault(name, {})["weights after 3 updates"] = max(each.values())
    assert max(each.values()) < bound, each
    for key, weight in expected["trained"].items():
        assert (weight - expected["initial"][key]).abs().max() > 5 * bound, key
    assert found["metrics"].keys() == expected["metrics"].keys()
    for key, value in expected["metrics"].items():
        assert np.isclose(found["metrics"][key], value, rtol=1e-3, atol=1e-4), key


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.steps and case.dtype == "float32"])
def test_the_probe_holds_whole_rows(outcomes, reference, name):
    (left, folder), (_, alone) = outcomes, reference(CASES[name])
    found, expected = (read(path / "audit" / "probe.safetensors") for path in (folder / name, alone))
    order = {key: row for row, key in enumerate(zip(expected["trajectory"], expected["token"], strict=True))}
    rows = [order[key] for key in zip(found["trajectory"], found["token"], strict=True)]
    assert len(rows) > 5 and found["logit_grad"].shape[1] == left[name]["initial"]["model.embed_tokens.weight"].shape[0]
    for column in ("logit_grad", "advantage", "scale"):
        assert np.allclose(found[column], expected[column][rows], rtol=1e-3, atol=1e-5), column
    weights = load_file(folder / name / "audit" / "weights" / "model.safetensors")
    assert weights.keys() == left[name]["initial"].keys()
    assert any(not torch.equal(weights[key], left[name]["trained"][key]) for key in weights)


@pytest.mark.parametrize("name", ["tp bfloat16", "dp bfloat16"])
def test_bfloat16_computes_low_and_keeps_high(outcomes, reference, name):
    found, (expected, _) = outcomes[0][name], reference(Case(CASES[name].model, dtype="float32", laws=(), steps=3))
    moved = 0
    for key, weight in expected["trained"].items():
        assert found["trained"][key].dtype == torch.bfloat16
        assert (found["trained"][key].float() - weight).abs().max() < 0.01, key
        moved += int((found["trained"][key] != found["initial"][key]).sum())
    assert moved > 1000
    assert abs(found["metrics"]["train/loss"] - expected["metrics"]["train/loss"]) < 0.05


@pytest.mark.parametrize("name", ["tp float32", "dp float32", "tp bfloat16"])
def test_a_resumed_update_is_the_uninterrupted_one_bit_for_bit(outcomes, name):
    (metrics, weights), (metrics_again, weights_again) = (outcomes[0][name][key] for key in ("next", "again"))
    assert metrics == metrics_again
    assert all(torch.equal(weight, weights_again[key]) for key, weight in weights.items())
    assert any(not torch.equal(weight, outcomes[0][name]["trained"][key]) for key, weight in weights.items())


@pytest.mark.parametrize(("name", "bound"), [("tp to dp", 1e-5), ("dp to pp", 1e-5), ("tp to pp bfloat16", 3e-3)])
def test_a_checkpoint_loads_under_another_layout_of_ranks(outcomes, name, bound):
    found, source = outcomes[0][name], outcomes[0][CASES[name].load]
    assert all(torch.equal(weight, found["loaded"][key]) for key, weight in source["trained"].items())
    assert any(not torch.equal(weight, found["initial"][key]) for key, weight in source["trained"].items())
    metrics, weights = found["next"]
    for key, value in source["next"][0].items():
        assert np.isclose(metrics[key], value, rtol=100 * bound, atol=20 * bound), key
    for key, weight in source["next"][1].items():
        assert (weights[key].float() - weight.float()).abs().max() < bound, key


def test_float32_checkpoints_hold_float32_masters_of_bfloat16_weights(outcomes):
    saved = load_file(outcomes[1] / "tp bfloat16" / "step" / "layer-00000.safetensors")
    weight = saved["weights/model.layers.0.mlp.up_proj.weight"]
    assert weight.dtype == torch.float32 and (weight != weight.bfloat16().float()).float().mean() > 0.5
    assert saved["exp_avg_sq/model.layers.0.self_attn.k_norm.weight"].min() >= 0


def read(file):
    with safe_open(file, "numpy") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}
