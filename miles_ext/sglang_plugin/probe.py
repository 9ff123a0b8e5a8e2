"""An independent witness for validation: saves what the sampler and the accept kernels were given, step by step.

A plugin of its own (entry point `miles_sc_probe`), asleep unless MILES_SC_PROBE names a folder. It shares no code with
the law or the capture, copies everything to the host, and is slow: never leave it on.

Each file `step-NNNNNN.safetensors` holds one sampling step; its metadata has `kind` and `rids` (JSON, in row order).
`sample` has logits [n, v] and tokens [n]; `verify` has logits [n * block, v], the kernel's own target law
probs [n, block, v], candidates [n, block] and accepted [n]: request i committed accepted[i] drafts and one bonus.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

PROBE_VARIABLE = "MILES_SC_PROBE"


class Witness:
    """Collects one step, then writes it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.steps = folder, 0
        self.rids: list[str] = []
        self.logits: Tensor | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, kind: str, **tensors: Tensor) -> None:
        from safetensors.torch import save_file

        found = {name: tensor.detach().contiguous().cpu().clone() for name, tensor in tensors.items()}
        path = self.folder / f"step-{self.steps:06d}.safetensors"
        save_file(found, path.with_suffix(".part"), metadata={"kind": kind, "rids": json.dumps(self.rids)})
        path.with_suffix(".part").rename(path)  # a reader sees whole files only
        self.steps += 1

    def around_batch(self, original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **rest: Any) -> Any:
        if batch is not None:
            self.rids = [request.rid for request in batch.reqs]
        return original(worker, batch, *args, **rest)

    def around_sampler(self, original: Callable[..., Any], sampler: Any, output: Any, *args: Any, **rest: Any) -> Any:
        logits = output.next_token_logits.clone()
        tokens = original(sampler, output, *args, **rest)
        self.write("sample", logits=logits, tokens=tokens)
        return tokens

    def around_verifier_law(self, original: Callable[..., Tensor], **arguments: Any) -> Tensor:
        self.logits = arguments["next_token_logits"].clone()
        return original(**arguments)

    def around_kernel(self, original: Callable[..., None], **arguments: Any) -> None:
        probs = arguments["target_probs"].clone()
        original(**arguments)
        logits, self.logits = self.logits, None
        if logits is not None and self.rids:
            self.write(
                "verify", logits=logits, probs=probs, candidates=arguments["candidates"],
                accepted=arguments["accept_token_num"],
            )  # fmt: skip


def register() -> None:
    """Entry point (`sglang.srt.plugins`)."""
    folder = os.environ.get(PROBE_VARIABLE)
    if not folder:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    witness = Witness(Path(folder))
    utils = "sglang.srt.speculative.dflash_utils"
    chain = "sglang.kernels.ops.speculative.dspark.dspark_accept.chain_speculative_sampling_triton"
    for target, function in (
        ("sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation", witness.around_batch),
        ("sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2.forward_batch_generation", witness.around_batch),
        ("sglang.srt.layers.sampler.Sampler.forward", witness.around_sampler),
        (f"{utils}.build_speculative_verify_target_probs", witness.around_verifier_law),
        (f"{utils}.tree_speculative_sampling_target_only", witness.around_kernel),
        (chain, witness.around_kernel),
    ):
        HookRegistry.register(target, function, HookType.AROUND)
