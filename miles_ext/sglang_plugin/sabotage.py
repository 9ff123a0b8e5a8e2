"""Faults for the controls of the proof table: what a check that works must notice. Never on in a server that is used.

A plugin of its own (entry point `miles_sc_sabotage`), asleep unless MILES_SC_SABOTAGE names a folder. Then the bonus
after a rejection is drawn anew from the target's law, as if nothing had been rejected, in both verifiers; and a file
`flip` in the folder flips one bit of the loaded draft before the next step. The capability names the variable among the
switches that break exactness.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SABOTAGE_VARIABLE = "MILES_SC_SABOTAGE"
FLIP = "flip"


def around_kernel(original: Callable[..., None], **arguments: Any) -> None:
    probs = arguments["target_probs"].clone()
    original(**arguments)
    accepted = arguments["accept_token_num"].long()
    rows = torch.arange(len(accepted), device=accepted.device)
    last = arguments["accept_index"].gather(1, accepted[:, None])[:, 0].long()
    again = torch.multinomial(probs[rows, accepted].double(), 1)[:, 0]
    rejected = accepted + 1 < arguments["candidates"].shape[1]
    predicts = arguments["predicts"]
    predicts[last] = torch.where(rejected, again.to(predicts.dtype), predicts[last])


class Flip:
    """Flips the lowest bit of one private weight of the draft where the file asks for it."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / FLIP

    def around_forward(self, original: Callable[..., Any], worker: Any, *args: Any, **rest: Any) -> Any:
        if self.file.exists():
            weight = dict(worker.draft_model.named_parameters())["fc.weight"].data
            weight.view(torch.int16 if weight.element_size() == 2 else torch.int32).view(-1)[0] ^= 1
            self.file.unlink()
        return original(worker, *args, **rest)


def register() -> None:
    """Entry point (`sglang.srt.plugins`)."""
    folder = os.environ.get(SABOTAGE_VARIABLE)
    if not folder:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, function in (
        ("sglang.srt.speculative.dflash_utils.tree_speculative_sampling_target_only", around_kernel),
        ("sglang.kernels.ops.speculative.dspark.dspark_accept.chain_speculative_sampling_triton", around_kernel),
        ("sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2.forward_batch_generation",
         Flip(Path(folder)).around_forward),
    ):  # fmt: skip
        HookRegistry.register(target, function, HookType.AROUND)
