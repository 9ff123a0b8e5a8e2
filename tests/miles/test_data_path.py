"""Rows from the samples to the loss, through Miles' own conversion, split, fetch, batch and training step."""

from __future__ import annotations

import inspect
import os
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from miles_ext.errors import CapabilityError, SupportError
from miles_ext.miles_adapter.samples import ATTRIBUTE
from miles_ext.miles_adapter.versions import ABSENT, COMMON, CONVERSION, differences, resolve, version
from miles_ext.sampling import SamplingSpec
from tests.miles.batches import packed, reference
from tests.miles.hooks import full_arguments, manager, samples_of, train_step
from tests.miles.state import set_state

SPEC = SamplingSpec(capture="head", head_size=6)


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory):
    store = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    set_state()
    yield
    dist.destroy_process_group()


@pytest.fixture
def on_cpu(monkeypatch):
    """Miles asks for the current GPU by name."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)


@pytest.fixture
def trainer(monkeypatch):
    """`trainer.init`, undone afterwards."""
    from miles_ext.miles_adapter import trainer as module

    actor, model = resolve(module.ACTOR), resolve(module.MODEL)
    for where, name in ((actor, "get_rollout_data"), (model, "get_batch")):
        monkeypatch.setattr(where, name, inspect.unwrap(getattr(where, name)))
    return module


def converted(args, samples, hook=None):
    """Training data by Miles' own conversion, with or without the hook; and the split that follows it."""
    if version("rollout").module_functions:
        module = resolve(CONVERSION)
        data = module.convert_samples_to_train_data(args, samples, {}, hook, None)
        split = module._package_shards if hook else inspect.unwrap(module._package_shards)
        return data, lambda data: split(args, {**data, "total_lengths": _totals(data)}, [[0, 2], [1]])
    one = manager(args)
    one.custom_convert_samples_to_train_data_func = hook
    data = one._convert_samples_to_train_data(samples)
    return data, lambda data: [opened(box) for box in one._split_train_data_by_dp(data, 2)]


def opened(box) -> Any:
    import ray

    return ray.get(box.inner)


def _totals(data):
    return [len(tokens) for tokens in data["tokens"]]


def hook():
    from miles_ext.miles_adapter.conversion import convert

    return convert


@pytest.mark.ray
def test_the_split_drops_rows_without_the_adapter_and_keeps_them_with_it(ray_cluster):
    found = packed(SPEC)
    args = full_arguments()
    data, split = converted(args, samples_of(found))
    assert ATTRIBUTE not in data
    data[ATTRIBUTE] = found.batch[ATTRIBUTE]
    for shard in split(data):
        assert ATTRIBUTE not in shard and "tokens" in shard  # the whitelist drops it

    plain = {key: value for key, value in data.items() if key not in (ATTRIBUTE, "total_lengths")}
    data, split = converted(args, samples_of(found), hook())
    assert {key: value for key, value in data.items() if key != ATTRIBUTE} == plain  # else Miles' own conversion
    shards = split(data)
    assert [list(shard["partition"]) for shard in shards] == [[0, 2], [1]]
    for shard in shards:
        wanted = [found.batch[ATTRIBUTE][j].rows.sampled_logprobs.tolist() for j in shard["partition"]]
        assert [one.rows.sampled_logprobs.tolist() for one in shard[ATTRIBUTE]] == wanted


def fetch(args, data, monkeypatch):
    """`get_rollout_data` of the training actor on one shard with everything, and what comes before the step."""
    from miles.backends.megatron_utils import actor
    from miles.backends.training_utils import data as module

    shard = {key: value for key, value in data.items() if key not in ("raw_reward", "rollout_ids")}
    shard["total_lengths"] = _totals(data)

    def process(*_, **__):
        return (dict(shard), None) if version("trainer").module_functions else dict(shard)

    monkeypatch.setattr(module, "process_rollout_data", process)
    fetched = actor.get_rollout_data(args, None)
    fetched = fetched[0] if isinstance(fetched, tuple) else fetched
    lengths = fetched["response_lengths"]
    fetched["advantages"] = [torch.full((n,), r) for n, r in zip(lengths, fetched["rewards"], strict=True)]
    return fetched


def test_one_training_step_has_the_reference_gradient(on_cpu, trainer, monkeypatch):
    """Through the real key list of `train_one_step`; without `trainer.init` the same step finds no rows and stops."""
    found = packed(SPEC)
    args = full_arguments(sc_mode="tis")
    data, _ = converted(args, samples_of(found), hook())
    with pytest.raises(SupportError, match="a micro-batch has no support rows; set --custom-megatron-init-path"):
        train_step(fetch(args, data, monkeypatch), args, found.logits, monkeypatch)

    trainer.init(args)
    trainer.init(args)  # a second model of the same process changes nothing
    metrics = train_step(fetch(args, data, monkeypatch), args, found.logits, monkeypatch)
    assert found.logits.grad is not None
    wanted = reference(found, SPEC, "tis", "on") / 3
    assert (found.logits.grad[0].double() - wanted).abs().max() <= 1e-6
    assert metrics["train_rollout_logprob_abs_diff"] > 0.1 and metrics["sc_support_size"] == 6


def test_logging_of_the_training_data_skips_rows(on_cpu, trainer, monkeypatch):
    from miles.backends.training_utils import log_utils

    logged = {}
    monkeypatch.setattr(log_utils, "gather_log_data", lambda name, args, rollout_id, values: logged.update(values))
    args = full_arguments()
    trainer.init(args)
    data, _ = converted(args, samples_of(packed(SPEC)), hook())
    resolve(trainer.ACTOR).log_rollout_data(0, args, fetch(args, data, monkeypatch))
    assert "rewards" in logged and ATTRIBUTE not in logged


@pytest.mark.parametrize(
    ("harm", "match"),
    [
        (lambda rows: None, "came without support rows"),
        (lambda rows: rows[:-1], "rows of 2 samples for 3 responses"),
        (lambda rows: [replace(rows[0], rows=rows[0].rows[:-1]), *rows[1:]], "sample 0 .* 4 support rows for .* 5"),
        (lambda rows: [rows[1], rows[0], rows[2]], "sample 0 .* 4 support rows for .* 5"),
        (lambda rows: [replace(one, spec=replace(one.spec, temperature=0.5)) for one in rows], "temperature=0.5"),
        (lambda rows: [replace(rows[0], vocab_size=40), *rows[1:]], r"vocabularies of \[20, 40\]"),
    ],
)
def test_bad_rows_stop_before_anything_trains(harm, match, on_cpu, trainer, monkeypatch):
    args = full_arguments()
    trainer.init(args)
    data, _ = converted(args, samples_of(packed(SPEC)), hook())
    rows = harm(data.pop(ATTRIBUTE))
    if rows is not None:
        data[ATTRIBUTE] = rows
    with pytest.raises(SupportError, match=match):
        fetch(args, data, monkeypatch)


def test_the_weight_selector_must_be_target_where_the_draft_is_private(trainer, monkeypatch):
    """Before Miles had selectors, the engines' plugin alone keeps updates away from the draft."""
    found = version("trainer")
    drafting = {"sc_arm": "dflash2", "sglang_speculative_algorithm": "DFLASH", "megatron_to_hf_mode": "raw"}
    trainer.require_target(full_arguments(**drafting), found)
    with pytest.raises(CapabilityError, match="megatron_to_hf_mode is 'bridge'"):
        trainer.init(full_arguments(**{**drafting, "megatron_to_hf_mode": "bridge"}))
    if not found.selector:
        assert differences({f"{COMMON}:weight_update_selector": ABSENT}) == []
        return
    modules = [resolve(name) for name in trainer.SELECTORS]
    for module in modules:
        monkeypatch.setattr(module, "weight_update_selector", module.weight_update_selector)
    mtp = full_arguments(**drafting, mtp_num_layers=1)
    with pytest.raises(CapabilityError, match="selector 'all', and the draft of arm 'dflash2' is private"):
        trainer.require_target(mtp, found)
    forced = full_arguments(**{**drafting, "megatron_to_hf_mode": "bridge"}, sc_force_target=True)
    assert modules[0].weight_update_selector(forced) == "all"
    trainer.require_target(forced, found)
    assert [module.weight_update_selector(forced) for module in modules] == ["target"] * 3


def test_conversion_refuses_what_it_cannot_vouch_for():
    args = full_arguments()

    def refused(change, match):
        samples = samples_of(packed(SPEC))
        change(samples[1])
        with pytest.raises(SupportError, match=match):
            converted(args, samples, hook())

    refused(lambda sample: delattr(sample, ATTRIBUTE), "sample 1 of group 1 .completed, 4 tokens. has no support rows")
    refused(lambda sample: setattr(sample, "tokens", sample.tokens[:-1] + [0]), "sample 1 of group 1: support row")
    refused(lambda sample: setattr(sample, "response_length", 3), "4 support rows for a response of 3")

    def overflow(sample):
        held = sample.sc_rows
        status = held.rows.status.copy()
        status[2] = 1
        sample.sc_rows = replace(held, rows=replace(held.rows, status=status))

    refused(overflow, "support row 2 has status 1; .*raise it")
    with pytest.raises(SupportError, match="sampled with .*temperature=1.0.*expects .*temperature=0.5"):
        converted(full_arguments(rollout_temperature=0.5), samples_of(packed(SPEC)), hook())


def test_the_hook_refuses_to_be_called_by_anyone_else():
    with pytest.raises(CapabilityError, match="must be called by"):
        hook()(full_arguments(), samples_of(packed(SPEC)))


@pytest.mark.ray
def test_inside_the_real_rollout_manager(ray_cluster, miles_source, tmp_path):
    """Ray ships the manager's class by value: only what runs in its process can make its split carry rows."""
    import ray
    from miles.ray import rollout

    if version("rollout").module_functions:
        from miles.ray.rollout import rollout_manager as rollout
    found = packed(SPEC)
    samples = [sample.to_dict() for sample in samples_of(found)]
    torch.save({"samples": samples, "rollout_id": 0, "metadata": {}}, tmp_path / "0.pt")
    args = full_arguments(
        debug_train_only=True, load_debug_rollout_data=str(tmp_path / "{rollout_id}.pt"), use_fault_tolerance=False,
        data_source_path="builtins.print", rollout_function_path="builtins.print", eval_num_gpus=0, ft_components=[],
        eval_function_path="builtins.print", save_debug_rollout_data=None, sglang_router_ip="x", sglang_router_port=1,
        sc_mode="tis", enable_event_analyzer=False,
    )  # fmt: skip
    here = os.path.dirname(__file__)
    variables = {
        "PYTHONPATH": os.pathsep.join([f"{here}/site", os.path.abspath(f"{here}/../..")]),
        "MILES_CONTRACT_SOURCE": str(miles_source),
    }
    actor = rollout.RolloutManager.options(num_cpus=1, runtime_env={"env_vars": variables}).remote(copy(args), None)
    ray.get(actor.set_train_parallel_config.remote({"dp_size": 2}))
    refs: Any = ray.get(actor.generate.remote(0))
    boxes = refs["data_ref"] if isinstance(refs, dict) else refs
    shards = [opened(box) for box in boxes]
    got = {index: one for shard in shards for index, one in zip(shard["partition"], shard[ATTRIBUTE], strict=True)}
    ray.kill(actor)
    assert sorted(got) == [0, 1, 2]
    for index, one in got.items():
        assert (one.rows.token_ids == found.batch[ATTRIBUTE][index].rows.token_ids).all() and one.spec == SPEC
