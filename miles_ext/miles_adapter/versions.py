"""The Miles versions that the adapters were written for, told apart by the functions that they wrap or call.

Miles has no version number that tells its layouts apart, so a version is what its signatures are.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from miles_ext.errors import CapabilityError

Side = Literal["rollout", "trainer"]
ABSENT = "nothing: it is absent"

_TYPES = "miles.utils.types:Sample"
_ENDPOINT = "miles.rollout.generate_utils.generate_endpoint_utils"
_INFERENCE = "miles.rollout.inference_rollout"
_DATA = "miles.backends.training_utils.data"
_CP = "miles.backends.training_utils.cp_utils"
_RESPONSES = "logits, *, args, unconcat_tokens, total_lengths, response_lengths, max_seq_lens=None"

_ROLLOUT = {
    f"{_TYPES}.strip_last_output_tokens": "self, n, tokenizer",
    f"{_TYPES}.reset_for_retry": "self",
    f"{_ENDPOINT}:compute_prompt_ids_from_sample": "state, sample, tools=None",
    f"{_ENDPOINT}:compute_request_payload": "args, input_ids, sampling_params, multimodal_inputs=None",
    f"{_ENDPOINT}:update_sample_from_response": "args, sample, payload, output, update_loss_mask=False",
    "miles.rollout.generate_hub.single_turn:generate": "input",
    "miles.utils.http_utils:post": "url, payload, max_retries=60, action='post', headers=None",
    "miles.utils.http_utils:get": "url",
    f"{_INFERENCE}.inference_rollout_train:get_worker_urls": "args",
    f"{_INFERENCE}.inference_rollout_common:InferenceRolloutFn.__init__": "self, input",
    f"{_INFERENCE}.inference_rollout_common:InferenceRolloutFn.__call__": "self, input",
}
_TRAINER = {
    "miles.backends.megatron_utils.model:get_batch": (
        "data_iterator, keys, pad_multiplier=128, qkv_format='thd', get_position_ids=False, allgather_cp=False"
    ),
    f"{_CP}:slice_log_prob_with_cp": "log_prob, total_length, response_length, qkv_format='thd', max_token_len=None",
    f"{_CP}:get_local_response_loss_masks": (
        "total_lengths, response_lengths, loss_masks, qkv_format='thd', max_seq_lens=None"
    ),
    "miles.backends.training_utils.parallel:get_parallel_state": "",
}
CONVERSION = "miles.ray.rollout.train_data_conversion"
COMMON = "miles.backends.megatron_utils.update_weight.common"


@dataclass(frozen=True, kw_only=True)
class Version:
    """signatures: of every function that the adapters wrap or call, by side. responses: where `get_responses` is.

    module_functions: conversion and split are functions of a module, not methods of the rollout manager.
    routing_headers, selector: whether requests carry them, and updates choose target or draft.
    """

    name: str
    signatures: Mapping[Side, Mapping[str, str]]
    responses: str
    module_functions: bool
    routing_headers: bool
    selector: bool


VERSIONS = (
    Version(
        name="miles-rl 0.0.2 (May 2026)",
        signatures={
            "rollout": {**_ROLLOUT, f"{_ENDPOINT}:compute_routing_headers": ABSENT},
            "trainer": {
                **_TRAINER,
                "miles.backends.megatron_utils.actor:get_rollout_data": "args, rollout_data_ref",
                "miles.backends.training_utils.loss:get_responses": _RESPONSES,
                f"{COMMON}:weight_update_selector": ABSENT,
            },
        },
        responses="miles.backends.training_utils.loss",
        module_functions=False,
        routing_headers=False,
        selector=False,
    ),
    Version(
        name="source of 21 August 2026 (31f1ca96)",
        signatures={
            "rollout": {
                **_ROLLOUT,
                f"{_ENDPOINT}:compute_routing_headers": "args, sample",
                f"{CONVERSION}:convert_samples_to_train_data": (
                    "args, samples, metadata, custom_convert_samples_to_train_data_func, "
                    "custom_reward_post_process_func"
                ),
                f"{CONVERSION}:_package_shards": "args, data, partitions",
            },
            "trainer": {
                **_TRAINER,
                "miles.backends.megatron_utils.actor:get_rollout_data": "args, rollout_data_ref, witness_info=None",
                "miles.backends.training_utils.loss_hub.logit_processors:get_responses": _RESPONSES,
                f"{COMMON}:weight_update_selector": "args",
                f"{CONVERSION}:_package_shards": "args, data, partitions",
            },
        },
        responses="miles.backends.training_utils.loss_hub.logit_processors",
        module_functions=True,
        routing_headers=True,
        selector=True,
    ),
)


@cache
def version(side: Side) -> Version:
    """The version whose signatures the installed Miles has. Raises CapabilityError naming the functions that differ
    from the nearest one."""
    found = [(differences(one.signatures[side]), one) for one in VERSIONS]
    wrong, nearest = min(found, key=lambda pair: len(pair[0]))
    if wrong:
        raise CapabilityError(
            f"this Miles is none that the adapter was written for ({'; '.join(one.name for one in VERSIONS)}). "
            f"Beside {nearest.name}: {'; '.join(wrong)}. Install one of them, or extend "
            "miles_ext/miles_adapter/versions.py"
        )
    return nearest


def differences(signatures: Mapping[str, str]) -> list[str]:
    """What the installed functions have that these signatures do not say, one line a function."""
    wrong = []
    for target, wanted in signatures.items():
        found = signature(target)
        if found != wanted:
            wrong.append(f"{target} takes {_brackets(found)}, wanted {_brackets(wanted)}")
    return wrong


def signature(target: str) -> str:
    """Parameters of `module:name.name` without their annotations, or ABSENT."""
    try:
        function = resolve(target)
    except AttributeError:
        return ABSENT
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("miles."):
            raise
        return ABSENT
    parts, bare = [], False
    for one in inspect.signature(inspect.unwrap(function)).parameters.values():
        if one.kind is one.KEYWORD_ONLY and not bare:
            parts, bare = [*parts, "*"], True
        star = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        bare = bare or one.kind is one.VAR_POSITIONAL
        parts.append(f"{star}{one.name}" + ("" if one.default is one.empty else f"={one.default!r}"))
    return ", ".join(parts)


def _brackets(parameters: str) -> str:
    return parameters if parameters == ABSENT else f"({parameters})"


def resolve(target: str) -> Any:
    module, _, names = target.partition(":")
    found: Any = importlib.import_module(module)
    for name in filter(None, names.split(".")):
        found = getattr(found, name)
    return found
