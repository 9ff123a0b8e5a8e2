"""The trainer's side of the data path: rows are checked when they arrive and reach the micro-batches of the loss."""

from __future__ import annotations

from argparse import Namespace
from functools import wraps
from typing import Any

from miles_ext.errors import CapabilityError, SupportError
from miles_ext.miles_adapter import conversion
from miles_ext.miles_adapter.arguments import settings_of, spec_of
from miles_ext.miles_adapter.refusals import refuse
from miles_ext.miles_adapter.samples import ATTRIBUTE
from miles_ext.miles_adapter.versions import COMMON, Version, resolve, version

ACTOR = "miles.backends.megatron_utils.actor"
MODEL = "miles.backends.megatron_utils.model"
# Where updates choose between target and draft, by modules that imported the function by name.
SELECTORS = (
    COMMON,
    "miles.backends.megatron_utils.update_weight.update_weight_from_tensor",
    "miles.backends.megatron_utils.update_weight.update_weight_from_distributed.mixin",
)


def init(args: Namespace) -> None:
    """--custom-megatron-init-path: called in every training process before its model is built.

    Raises CapabilityError for a Miles, an argument or a weight selector that does not fit.
    """
    found = version("trainer")
    refuse(args)
    if found.module_functions:
        conversion.carry()  # where the split is delayed, it runs here
    require_target(args, found)
    actor, model = resolve(ACTOR), resolve(MODEL)
    if getattr(model.get_batch, "sc_carries", False):
        return
    actor.get_rollout_data = checking(actor.get_rollout_data)
    model.get_batch = carrying(model.get_batch)


def require_target(args: Namespace, found: Version) -> None:
    """A private draft gets no update. Before selectors existed, the engines' plugin alone sees to that."""
    settings = settings_of(args)
    if settings.arm == "regular" or not found.selector:
        return
    selector = resolve(f"{COMMON}:weight_update_selector")
    if settings.force_target:
        for name in SELECTORS:
            resolve(name).weight_update_selector = lambda _args: "target"
    elif selector(args) != "target":
        raise CapabilityError(
            f"Miles sends weights with selector {selector(args)!r}, and the draft of arm {settings.arm!r} is private: "
            "use --megatron-to-hf-mode raw without MTP, or set sc_force_target"
        )


def checking(get_rollout_data: Any) -> Any:
    """Rows are of this shard's responses and of this trainer's law, or nothing is trained."""

    @wraps(get_rollout_data)
    def wrapper(args, *rest, **named):
        result = get_rollout_data(args, *rest, **named)
        require_rows(args, result[0] if isinstance(result, tuple) else result)
        return result

    return wrapper


def require_rows(args: Namespace, data: dict[str, Any]) -> None:
    rows, lengths, spec = data.get(ATTRIBUTE), data["response_lengths"], spec_of(args)
    if rows is None:
        raise SupportError(
            "the training data came without support rows; set --custom-convert-samples-to-train-data-path to "
            "miles_ext.miles_adapter.conversion.convert, and do not load rollouts that were saved without it"
        )
    if len(rows) != len(lengths):
        raise SupportError(f"rows of {len(rows)} samples for {len(lengths)} responses; accepted: one each")
    for index, (one, tokens, length) in enumerate(zip(rows, data["tokens"], lengths, strict=True)):
        one.require(tokens[len(tokens) - length :].cpu().numpy(), spec, f"sample {index} of this rank's shard")
    vocabularies = sorted({one.vocab_size for one in rows})
    if len(vocabularies) > 1:
        raise SupportError(f"rows over vocabularies of {vocabularies}; accepted: one")


def carrying(get_batch: Any) -> Any:
    """Micro-batches hold the rows of their samples."""

    @wraps(get_batch)
    def wrapper(data_iterator, keys, *rest, **named):
        known = ATTRIBUTE in data_iterator.rollout_data
        return get_batch(data_iterator, [*keys, ATTRIBUTE] if known else keys, *rest, **named)

    wrapper.__dict__["sc_carries"] = True
    return wrapper
