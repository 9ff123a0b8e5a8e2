"""The last check of strict mode, in the worker: a sampled step that was verified greedily fails its requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

import torch

from miles_ext.sglang_plugin.plan import plan_of

MESSAGE = (
    "this step was verified by comparing with the argmax, because the draft gave no proposal distribution or the "
    "verifier is missing: its tokens are not samples of the requested law, and nothing of them is returned"
)


class DeviceRefusal:
    """sglang's DeviceAuxiliaryOutput without tensors."""

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> HostRefusal:
        return HostRefusal()


class HostRefusal:
    """sglang's HostAuxiliaryOutput: ends every sampled request of the step with an error, and leaves greedy ones."""

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        sampled = (plan_of(batch.reqs).temperature > 0).tolist()
        for request, commit, is_sampled in zip(batch.reqs, commits, sampled, strict=True):
            if commit is None or not is_sampled:
                continue
            abort = FINISH_ABORT(MESSAGE, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")
            if request.finished():
                request.finished_reason = abort
            else:
                request.to_finish = abort
