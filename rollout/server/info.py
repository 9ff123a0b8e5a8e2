"""What the server says of itself: capability, model, weights."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, ClassVar, Literal

import xxhash

from miles_ext.tensors import entries
from rollout.embedded.engine import EmbeddedEngine
from rollout.server.fields import Body
from rollout.server.front import Front
from rollout.server.native import GenerateBody
from rollout.server.openai import ChatBody, CompletionBody
from rollout.server.params import NativeSampling

ALGORITHM = {"regular": None, "dflash": "DFLASH", "dflash2": "DFLASH"}


async def server_info(front: Front) -> dict[str, Any]:
    """sglang's `/server_info`; the capability of every rank under `internal_states[0].sc.ranks`, as in the plugin."""
    ranks = [
        {**asdict(rank), "patches": sorted(rank.patches)} for rank in await front.engine.call(lambda e: e.capability())
    ]
    first = ranks[0]
    state = {
        "dflash_sampling_verify_available": first["dflash_sampling_verify_available"],
        "speculative_accept_threshold_single": first["accept_threshold_single"],
        "speculative_accept_threshold_acc": first["accept_threshold_acc"],
        "weight_version": str(first["weight_version"]),
        "sc": {"ranks": ranks},
    }
    bodies = {
        "/generate": GenerateBody,
        "/generate sampling_params": NativeSampling,
        "/v1/completions": CompletionBody,
        "/v1/chat/completions": ChatBody,
    }
    return {
        **await model_info(front),
        "version": first["engine_version"],
        "engine": first["engine"],
        "speculative_algorithm": ALGORITHM[first["arm"]],
        "context_length": front.model.context_length,
        "max_running_requests": front.engine.max_batch,
        "tp_size": 1,
        "dp_size": 1,
        "accepts": {where: sorted(body.model_fields) for where, body in bodies.items()},
        "internal_states": [state],
    }


async def model_info(front: Front) -> dict[str, Any]:
    model = front.model
    return {
        "model_path": str(model.folder),
        "tokenizer_path": str(model.folder),
        "served_model_name": model.name,
        "is_generation": True,
        "weight_version": str(await front.engine.call(lambda e: e.weight_version)),
        "model_type": model.config.get("model_type"),
        "architectures": model.config.get("architectures"),
        "vocab_size": model.vocab_size,
        "eos_token_ids": list(model.eos_ids),
    }


def models(front: Front) -> dict[str, Any]:
    card = {"id": front.model.name, "object": "model", "owned_by": "rollout.server", "root": str(front.model.folder)}
    return {"object": "list", "data": [card | {"max_model_len": front.model.context_length}]}


class CheckBody(Body):
    action: Literal["checksum"] = "checksum"
    selector: Literal["all", "target", "draft"] = "all"
    OFF: ClassVar = {
        "skip_tensor_list": ([], "every tensor is summed"),
        "allow_quant_error": (False, "checksums are exact"),
    }


async def weights_checker(front: Front, body: Any) -> dict[str, Any]:
    """Checksums of the bytes in memory, computed now: XXH3-128 by Hugging Face name, the draft's after `draft.`."""
    fields = CheckBody.read(body, "request")

    def sums(engine: EmbeddedEngine) -> dict[str, str]:
        found = {}
        if fields.selector != "draft":
            found |= {name: entry.digest for name, entry in entries(engine.target.named_hf_tensors()).items()}
        if fields.selector != "target" and engine.draft is not None:
            private = entries(engine.draft.private_tensors())
            found |= {f"draft.{name}": entry.digest for name, entry in private.items()}
        return found

    checksums = await front.engine.call(sums)
    overall = xxhash.xxh3_128_hexdigest("".join(f"{name}\t{one}\n" for name, one in sorted(checksums.items())).encode())
    return {
        "success": True,
        "message": "Success.",
        "ranks": [{"checksums": checksums, "per_gpu_checksum": overall}],
        "per_engine_checksum": overall,
    }
