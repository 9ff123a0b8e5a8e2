"""An independent witness for validation: saves what the sampler and the accept kernels were given, step by step.

A plugin of its own (entry point `miles_sc_probe`), asleep unless MILES_SC_PROBE names a folder. It shares no code with
the law or the capture. While the folder holds a file `watch` it copies everything to the host, and is slow. A file
`seed` (a decimal number) is taken away before the next step, which draws from a generator set anew.

Each file `step-NNNNNN.safetensors` holds one sampling step; its metadata has `kind` and `rids` (JSON, in row order).
`prefill` and `decode` have logits [n, v], the law that was drawn from probs [n, v], and tokens [n]; `verify` has logits
[n * block, v], the kernel's own target law probs [n, block, v], candidates [n, block], accepted [n] and bonus [n]:
request i committed accepted[i] drafts and its bonus.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PROBE_VARIABLE = "MILES_SC_PROBE"
WATCH, SEED = "watch", "seed"


class Witness:
    """Collects one step, then writes it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.steps = folder, 0
        self.rids: list[str] = []
        self.sampled = "decode"
        self.logits: Tensor | None = None
        self.drawn_from: Tensor | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def watching(self) -> bool:
        return (self.folder / WATCH).exists()

    def write(self, kind: str, **tensors: Tensor) -> None:
        from safetensors.torch import save_file

        found = {name: tensor.detach().contiguous().cpu().clone() for name, tensor in tensors.items()}
        path = self.folder / f"step-{self.steps:06d}.safetensors"
        save_file(found, path.with_suffix(".part"), metadata={"kind": kind, "rids": json.dumps(self.rids)})
        path.with_suffix(".part").rename(path)  # a reader sees whole files only
        self.steps += 1

    def around_batch(self, original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **rest: Any) -> Any:
        if batch is not None and getattr(batch, "reqs", None):
            self.rids = [request.rid for request in batch.reqs]
            self.sampled = "prefill" if batch.forward_mode.is_extend() else "decode"
            self.reseed()
        return original(worker, batch, *args, **rest)

    def reseed(self) -> None:
        file = self.folder / SEED
        if file.exists():
            torch.manual_seed(int(file.read_text()))
            file.unlink()

    def around_sampler(self, original: Callable[..., Any], sampler: Any, output: Any, *args: Any, **rest: Any) -> Any:
        if not self.watching:
            return original(sampler, output, *args, **rest)
        logits, self.drawn_from = output.next_token_logits.clone(), None
        tokens = original(sampler, output, *args, **rest)
        law = {} if self.drawn_from is None else {"probs": self.drawn_from}
        self.write(self.sampled, logits=logits, tokens=tokens, **law)
        return tokens

    def around_draw(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Around what the plugin's sampler draws with: its argument is what sglang's kernels are to the verifiers."""

        def draw(probs: Tensor, *args: Any, **rest: Any) -> Tensor:
            if self.watching:
                self.drawn_from = probs.clone()
            return original(probs, *args, **rest)

        return draw

    def around_verifier_law(self, original: Callable[..., Tensor], **arguments: Any) -> Tensor:
        if self.watching:
            self.logits = arguments["next_token_logits"].clone()
        return original(**arguments)

    def around_kernel(self, original: Callable[..., None], **arguments: Any) -> None:
        if not self.watching:
            return original(**arguments)
        probs = arguments["target_probs"].clone()
        original(**arguments)
        logits, self.logits = self.logits, None
        if logits is not None and self.rids:
            accepted = arguments["accept_token_num"]
            last = arguments["accept_index"].gather(1, accepted.long()[:, None])[:, 0]
            self.write(
                "verify", logits=logits, probs=probs, candidates=arguments["candidates"], accepted=accepted,
                bonus=arguments["predicts"][last.long()],
            )  # fmt: skip


def register() -> None:
    """Entry point (`sglang.srt.plugins`)."""
    folder = os.environ.get(PROBE_VARIABLE)
    if not folder:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from miles_ext.sglang_plugin import sampler

    witness = Witness(Path(folder))
    sampler.draw = witness.around_draw(sampler.draw)
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
