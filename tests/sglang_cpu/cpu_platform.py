"""An out-of-tree sglang platform for a plain CPU, so that the real scheduler and DFlash worker run in tests.

sglang's own CPU platform needs kernels that no wheel on PyPI brings, and refuses DFLASH.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformCapabilities, PlatformEnum, SRTPlatform

ATTENTION = "torch_native"


def activate() -> str:
    return f"{__name__}.CpuTestPlatform"


class CpuTestPlatform(CpuDeviceMixin, SRTPlatform):
    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return ATTENTION

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm == "DFLASH"

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == ATTENTION

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        return cache_locs


def cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Slots of every row from start to end, int64, row after row."""
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    return torch.cat([req_to_token[row, start:end] for row, start, end in spans]).long()
