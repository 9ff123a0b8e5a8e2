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
    for feature, hooks in HOOKS.items():
        matching = [guard.check(feature, hook.target, hook.digest) for hook in hooks]
        matching += [guard.rely(feature, target, digest) for target, digest in RELIED.get(feature, ())]
        if all(matching):
            for hook in hooks:
                HookRegistry.register(hook.target, hook.function, HookType[hook.how])
        else:
            logger.error("miles_sc: %s is left out: %s", feature, "; ".join(guard.complaints([feature])))
