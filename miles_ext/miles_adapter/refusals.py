"""What Miles can do that has no meaning beside this loss: refused by name, before anything runs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any, NamedTuple

from miles_ext.errors import CapabilityError
from miles_ext.miles_adapter.arguments import settings_of, spec_of

PACKAGE = "miles_ext.miles_adapter"


class Refusal(NamedTuple):
    """argument: attribute of Miles' arguments (absent: the version has no such feature). bad: values refused."""

    argument: str
    bad: Callable[[Any], bool]
    why: str


def _not_in(*accepted: Any) -> Callable[[Any], bool]:
    return lambda value: value not in accepted


def _adapter_path(path: Any) -> bool:
    return not str(path).startswith(PACKAGE)


# fmt: off
REFUSALS = (
    Refusal("train_backend", _not_in("megatron", None), "rows are carried through the Megatron backend only"),
    Refusal("loss_type", _not_in("custom_loss"), "the rows would not be used; set it to custom_loss"),
    Refusal("custom_loss_function_path", _adapter_path, f"set it to {PACKAGE}.loss.score_centered_loss"),
    Refusal("custom_generate_function_path", lambda path: path is not None and _adapter_path(path),
            "only single-turn generation records rows; leave it out"),
    Refusal("custom_convert_samples_to_train_data_path", _adapter_path, f"set it to {PACKAGE}.conversion.convert"),
    Refusal("use_tis", bool, "this loss weighs tokens itself; set --sc-mode tis or mis instead"),
    Refusal("get_mismatch_metrics", bool, "they belong to Miles' policy loss; this loss reports its own"),
    Refusal("use_opsm", bool, "a mask over whole sequences is outside the expectation that centering subtracts"),
    Refusal("advantage_estimator", lambda name: name in ("gspo", "on_policy_distillation"),
            "sequence ratios and distillation are not part of this loss; use grpo, ppo or reinforce_plus_plus"),
    Refusal("use_opd", bool, "distillation scores the whole vocabulary, a filtered law only its support"),
    Refusal("use_kl_loss", bool, "the KL term scores the whole vocabulary, a filtered law only its support"),
    Refusal("kl_coef", bool, "the KL reward scores the whole vocabulary, a filtered law only its support"),
    Refusal("entropy_coef", bool, "this loss has no entropy term; set it to 0"),
    Refusal("allgather_cp", bool, "its reducers expect another order of rows than its logits have; use ring CP"),
    Refusal("true_on_policy_mode", bool, "it rounds the logits, and there is nothing to correct"),
    Refusal("recompute_logprobs_via_prefill", bool, "it overwrites the logprobs of the law that was sampled"),
    Refusal("multi_lora_n_adapters", bool, "rows do not name an adapter"),
    Refusal("prefill_num_servers", bool, "the engine records no rows in disaggregated serving"),
    Refusal("object_store_backend", _not_in("ray", None), "rows travel as Python objects; use ray"),
    Refusal("miles_router_middleware_paths", lambda paths: any("RadixTree" in str(path) for path in paths or ()),
            "the radix tree middleware replaces tokens and logprobs of a response"),
)
# fmt: on


def refuse(args: Namespace) -> None:
    """Raise CapabilityError listing every argument that does not fit; ValueError where settings contradict."""
    settings = settings_of(args)
    spec_of(args)
    values = vars(args)
    wrong = [
        f"{refusal.argument} is {values[refusal.argument]!r}: {refusal.why}"
        for refusal in REFUSALS
        if refusal.argument in values and refusal.bad(values[refusal.argument])
    ]
    drafting = bool(values.get("sglang_speculative_algorithm"))
    if drafting != (settings.arm != "regular"):
        wrong.append(
            f"sc_arm is {settings.arm!r} beside sglang_speculative_algorithm "
            f"{values.get('sglang_speculative_algorithm')!r}: regular goes without one, dflash and dflash2 with DFLASH"
        )
    if settings.arm != "regular":
        if values.get("mtp_num_layers") or values.get("enable_mtp_training"):
            wrong.append("MTP training would send draft weights: the draft is private to the engines")
        if values.get("megatron_to_hf_mode") == "bridge" and not settings.force_target:
            wrong.append(
                "megatron_to_hf_mode is 'bridge', with which Miles updates the draft too: use raw, or set "
                "sc_force_target"
            )
    if wrong:
        raise CapabilityError("score centering cannot run with these arguments of Miles: " + "; ".join(wrong))
