"""A plugin for one server of `show`: takes the target-only verifier away, as on a device that has none."""

from __future__ import annotations


def register() -> None:
    """Entry point (`sglang.srt.plugins`), loaded where SGLANG_PLUGINS names it."""
    from sglang.srt.speculative import dflash_utils

    dflash_utils.tree_speculative_sampling_target_only = None
    dflash_utils._DFLASH_SAMPLING_VERIFY_AVAILABLE = False
