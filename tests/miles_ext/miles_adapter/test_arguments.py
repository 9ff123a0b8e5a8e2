"""Settings by flag and by file, the law they make with Miles' arguments, and the features that are refused."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

import pytest
import yaml

from miles_ext.errors import CapabilityError
from miles_ext.miles_adapter.arguments import Settings, add_arguments, settings_of, spec_of
from miles_ext.miles_adapter.refusals import PACKAGE, REFUSALS, refuse
from miles_ext.sampling import SamplingSpec

MILES = dict(
    rollout_temperature=1.0, rollout_top_k=-1, rollout_top_p=1.0, train_backend="megatron", loss_type="custom_loss",
    custom_loss_function_path=f"{PACKAGE}.loss.score_centered_loss", custom_generate_function_path=None,
    custom_convert_samples_to_train_data_path=f"{PACKAGE}.conversion.convert", use_tis=False, kl_coef=0.0,
    advantage_estimator="grpo", sglang_speculative_algorithm=None, megatron_to_hf_mode="raw",
)  # fmt: skip


def args(**changes) -> Namespace:
    return Namespace(**{**MILES, **changes})


def parsed(*line: str) -> Settings:
    parser = ArgumentParser()
    add_arguments(parser)
    return settings_of(parser.parse_args(line))


def test_flags():
    assert parsed() == Settings()
    line = "--sc-mode mis --sc-mis-high 3 --sc-centering diagnose --sc-head-size 64 --sc-arm dflash2 --sc-force-target"
    assert parsed(*line.split()) == Settings(
        mode="mis", mis_high=3.0, centering="diagnose", head_size=64, arm="dflash2", force_target=True
    )
    with pytest.raises(SystemExit):
        parsed("--sc-mode", "tiss")


def test_a_file_whose_words_yaml_reads_as_booleans():
    """Miles sets every key of --custom-config-path as an attribute; YAML 1.1 reads on and off as true and false."""
    for word in ("on", "off", "diagnose"):
        values = yaml.safe_load(f"sc_centering: {word}\nsc_tis_clip: 3\nsc_mode: none")
        assert settings_of(args(**values)) == Settings(centering=word, tis_clip=3.0)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"sc_centring": "on"}, "unknown setting sc_centring; did you mean sc_centering"),
        ({"sc_mode": "tiss"}, "sc_mode is 'tiss'; accepted: none, tis, mis"),
        ({"sc_mode": None}, "sc_mode is None; accepted"),
        ({"sc_tis_clip": "2"}, "sc_tis_clip is '2'; accepted: a number"),
        ({"sc_tis_clip": True}, "sc_tis_clip is True; accepted: a number"),
        ({"sc_head_size": 8.5}, "sc_head_size is 8.5; accepted: a number"),
        ({"sc_force_target": "yes"}, "sc_force_target is 'yes'; accepted: true or false"),
        ({"sc_tis_clip": 0}, "tis_clip 0.0; accepted: a number > 0"),
        ({"sc_mis_low": 6}, "mis bounds"),
    ],
)
def test_bad_settings(change, match):
    with pytest.raises(ValueError, match=match):
        settings_of(args(**change))


def test_the_law_is_that_of_miles_arguments():
    assert spec_of(args(sc_head_size=64)) == SamplingSpec(capture="head", head_size=64)
    filtered = args(rollout_temperature=0.7, rollout_top_k=32, rollout_top_p=0.95, sc_filter_order="joint")
    assert spec_of(filtered) == SamplingSpec(temperature=0.7, top_k=32, top_p=0.95, filter_order="joint")
    assert spec_of(args(sc_capture="complete")).capture == "complete"
    for change, match in (
        ({"rollout_temperature": 0.0}, "temperature 0 has no law"),
        ({"rollout_top_p": 0.9, "sc_capture": "head"}, "a head needs the unfiltered law"),
    ):
        with pytest.raises(ValueError, match=match):
            spec_of(args(**change))


def test_arguments_that_fit_are_let_through():
    refuse(args())
    refuse(args(sc_arm="dflash2", sglang_speculative_algorithm="DFLASH"))
    everything = {"sc_arm": "dflash", "sglang_speculative_algorithm": "DFLASH", "megatron_to_hf_mode": "bridge"}
    refuse(args(**everything, sc_force_target=True))
    refuse(args(object_store_backend="ray", miles_router_middleware_paths=["some.other"], entropy_coef=0.0))


BAD = dict(
    train_backend="fsdp", loss_type="policy_loss", custom_loss_function_path="mine.loss", use_tis=True,
    custom_generate_function_path="miles.rollout.generate_hub.multi_turn.generate", get_mismatch_metrics=True,
    custom_convert_samples_to_train_data_path=None, use_opsm=True, advantage_estimator="gspo", use_opd=True,
    use_kl_loss=True, kl_coef=0.1, entropy_coef=0.01, allgather_cp=True, true_on_policy_mode=True,
    recompute_logprobs_via_prefill=True, multi_lora_n_adapters=2, prefill_num_servers=1,
    object_store_backend="mooncake", miles_router_middleware_paths=["miles.router.RadixTreeMiddleware"],
)  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.argument)
def test_every_feature_without_meaning_here_is_refused_by_name(refusal):
    with pytest.raises(CapabilityError) as caught:
        refuse(args(**{refusal.argument: BAD[refusal.argument]}))
    assert f"{refusal.argument} is {BAD[refusal.argument]!r}: {refusal.why}" in str(caught.value)


def test_everything_that_is_wrong_is_told_at_once():
    with pytest.raises(CapabilityError, match="use_tis is True.*kl_coef is 0.1"):
        refuse(args(use_tis=True, kl_coef=0.1))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"sc_arm": "dflash"}, "sc_arm is 'dflash' beside sglang_speculative_algorithm None"),
        ({"sglang_speculative_algorithm": "DFLASH"}, "sc_arm is 'regular' beside .* 'DFLASH'"),
        ({"mtp_num_layers": 1}, "MTP training would send draft weights"),
        ({"enable_mtp_training": True}, "MTP training would send draft weights"),
        ({"megatron_to_hf_mode": "bridge"}, "megatron_to_hf_mode is 'bridge', with which Miles updates the draft"),
    ],
)
def test_what_would_reach_a_private_draft(change, match):
    drafting = {} if change.keys() <= {"sc_arm", "sglang_speculative_algorithm"} else {
        "sc_arm": "dflash2", "sglang_speculative_algorithm": "DFLASH",
    }  # fmt: skip
    with pytest.raises(CapabilityError, match=match):
        refuse(args(**drafting, **change))
