"""Part `updates`: new weights reach the target only, by disk and by tensor, and the draft accepts what it did."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from experiments.evidence import Row, at_most
from miles_ext.capability import ArmKind, EngineCapability
from miles_ext.sampling import SamplingSpec
from miles_ext.sglang_plugin.report import from_json
from miles_ext.tensors import digest
from tests.sglang_cpu.answers import ask, check
from tests.sglang_cpu.server import TINY, Server
from tests.sglang_cuda.show_rows import prompts

GREEDY = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}


def rows(server: Server, arm: ArmKind, device: str) -> list[Row]:
    original = load_file(TINY / "target" / "model.safetensors")
    changed = {name: tensor + 0.01 for name, tensor in original.items()}
    before, accepted = capability(server), accept_length(server)
    with tempfile.TemporaryDirectory() as scratch:
        other = Path(scratch) / "target"
        shutil.copytree(TINY / "target", other)
        save_file(changed, other / "model.safetensors", metadata={"format": "pt"})
        steps = [("disk, identity", original, TINY / "target"), ("disk, other weights", changed, other),
                 ("disk, back", original, TINY / "target")]  # fmt: skip
        found = [judge(arm, name, before, push_disk(server, folder, 10 + i), tensors, original)
                 for i, (name, tensors, folder) in enumerate(steps)]  # fmt: skip
    if device == "cuda":
        for i, (name, tensors) in enumerate(
            [("tensor, identity", original), ("tensor, other weights", changed), ("tensor, back", original)]
        ):
            found.append(judge(arm, name, before, push_tensors(server, tensors, 20 + i), tensors, original))
    (answer,) = ask(server, prompts(2)[:1], SamplingSpec(top_k=32), max_new_tokens=8)
    check(answer)
    if arm != "regular":
        again = accept_length(server)
        detail = f"{accepted:.4f} before, {again:.4f} after; greedy, 32 prompts of 48 tokens"
        found.append(at_most(f"updates/{arm} accept length", abs(again - accepted) / accepted, 0.02, "apart", detail))
    return found


def judge(
    arm: ArmKind, name: str, before: EngineCapability, after: EngineCapability | str, sent: dict[str, Tensor],
    original: dict[str, Tensor],
) -> Row:  # fmt: skip
    """The received digest is that of what was sent, the target moved or came back, the draft stayed."""
    if isinstance(after, str):
        return Row(f"updates/{arm} {name}", 0, "", "succeeds", False, after)
    same = sent is original
    held = {
        "received digest": after.extra["received_digest"] == digest(sent),
        "target": (after.resident_digest == before.resident_digest) == same,
        "draft": after.draft_digest == before.draft_digest and (after.draft_digest == "") == (arm == "regular"),
    }
    wrong = [what for what, good in held.items() if not good]
    detail = f"draft {after.draft_digest or 'none'}, target {after.resident_digest}, version {after.weight_version}"
    return Row(f"updates/{arm} {name}", len(held) - len(wrong), "of 3", "all", not wrong, "; ".join([detail, *wrong]))


def push_disk(server: Server, folder: Path, version: int) -> EngineCapability | str:
    body = {"model_path": str(folder), "weight_version": str(version)}
    answer = server.post("/update_weights_from_disk", body)
    return capability(server) if answer.status_code == 200 and answer.json()["success"] else answer.text


def push_tensors(server: Server, tensors: dict[str, Tensor], version: int) -> EngineCapability | str:
    """Two buckets of CUDA tensors, handed over by their IPC handles."""
    from sglang.srt.utils import MultiprocessingSerializer

    there = [(name, tensor.cuda()) for name, tensor in tensors.items()]
    posts: list[tuple[str, dict[str, Any]]] = [("/begin_weight_update", {"selector": "target"})]
    for bucket in (there[::2], there[1::2]):
        sent = MultiprocessingSerializer.serialize(bucket, output_str=True)
        body = {"serialized_named_tensors": [sent], "selector": "target", "weight_version": str(version)}
        posts.append(("/update_weights_from_tensor", body))
    posts.append(("/end_weight_update", {}))
    for path, body in posts:
        answer = server.post(path, body)
        if answer.status_code != 200 or not answer.json().get("success"):
            return f"{path}: {answer.status_code} {answer.text[:300]}"
    return capability(server)


def memory(server: Server) -> list[Row]:
    """Release and resume: both models are back, and the draft is proved again."""
    before, accepted = capability(server), accept_length(server)
    free = [torch.cuda.mem_get_info()[0]]
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        answer = server.post(path, {})
        if answer.status_code != 200:
            return [Row("updates/release and resume", 0, "", "succeeds", False, f"{path}: {answer.text[:300]}")]
        free.append(torch.cuda.mem_get_info()[0])
    after, again = capability(server), accept_length(server)
    same = (after.draft_digest, after.resident_digest) == (before.draft_digest, before.resident_digest)
    detail = f"draft {after.draft_digest}, was {before.draft_digest}; accept length {again:.4f}, was {accepted:.4f}"
    freed, taken = (free[1] - free[0]) / 2**20, (free[1] - free[2]) / 2**20
    detail_of_bytes = f"of the device, with other servers idle; {taken:.0f} MiB taken again by the resume"
    return [
        Row("updates/release and resume", float(same), "", "both digests equal", same, detail),
        Row("updates/released memory", freed, "MiB", "> 0", freed > 0, detail_of_bytes),
    ]


def accept_length(server: Server) -> float:
    """Committed tokens a verify step of greedy responses; 0 for the regular arm. On an empty cache: a prefix that is
    found there is not computed again, and bfloat16 rounds its logits by the shape of the batch."""
    server.post("/flush_cache", {})
    items = server.generate({"input_ids": prompts(32), "sampling_params": GREEDY})
    steps = sum(item["meta_info"].get("spec_verify_ct", 0) for item in items)
    return sum(item["meta_info"]["completion_tokens"] for item in items) / steps if steps else 0.0


def capability(server: Server) -> EngineCapability:
    return from_json(server.ranks()[0])
