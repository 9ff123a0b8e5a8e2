"""The entry point of the plugin: hooks every feature whose functions all match, and nothing of the others."""

from __future__ import annotations

import logging

from miles_ext.sglang_plugin import guard
from miles_ext.sglang_plugin.settings import read_settings

logger = logging.getLogger(__name__)


def register() -> None:
    """Called by sglang in each of its processes. sglang logs what this raises and goes on without the plugin, so
    clients must check the capability that a hooked server reports."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from miles_ext.sglang_plugin.hooks import HOOKS, RELIED

    read_settings()
    mismatched = {h.feature for h in HOOKS if not guard.check(h.feature, h.target, h.digest)}
    mismatched |= {feature for feature, target, digest in RELIED if not guard.rely(feature, target, digest)}
    for hook in HOOKS:
        if hook.feature not in mismatched:
            HookRegistry.register(hook.target, hook.function, HookType[hook.how])
    if mismatched:
        logger.error("miles_sc: features left out: %s", "; ".join(guard.complaints(sorted(mismatched))))
