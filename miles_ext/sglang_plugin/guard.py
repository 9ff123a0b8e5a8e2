"""Proof that a hooked function is the one the hook was written for: sglang's version and a digest of the source.

A plugin that fails is only logged by sglang, so nothing here raises. What does not match is not hooked, is named in
the capability, and capture that needs it is refused.
"""

from __future__ import annotations

import hashlib
import inspect
import pkgutil
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from miles_ext.sglang_plugin import SGLANG_VERSION

CAPTURE_FEATURES = ("strict_refusal", "one_law", "overflow", "flat_capture")
PATCHES_OF = {"one_law": ("one_law", "cutoff_ties")}  # the law keeps ties: one feature, two promises

_complaints: dict[str, list[str]] = {}
_targets: dict[str, list[str]] = {}


def check(feature: str, target: str, digest: str) -> bool:
    """Whether `target` has the expected source; remembers the complaint where it has not."""
    _targets.setdefault(feature, []).append(target)
    installed = version("sglang")
    if installed != SGLANG_VERSION:
        problem = f"sglang is {installed}, the plugin knows {SGLANG_VERSION}"
    else:
        problem = _source_problem(target, digest)
    if problem:
        _complaints.setdefault(feature, []).append(f"{target}: {problem}")
    return not problem


def _source_problem(target: str, digest: str) -> str:
    try:
        found = source_digest(target)
    except (ImportError, AttributeError, OSError, TypeError, ValueError) as error:
        return f"not found ({error})"
    return "" if found == digest else f"source digest is {found}, the plugin knows {digest}"


def source_digest(target: str) -> str:
    """16 hex digits over the source of a function or class, its signature included, decorators looked through."""
    source = inspect.getsource(inspect.unwrap(pkgutil.resolve_name(target)))
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def complaints(features: Iterable[str] | None = None) -> list[str]:
    """One line a function that does not match, and one a hook that sglang failed to apply."""
    wanted = _targets.keys() if features is None else features
    lines = [line for feature in wanted for line in _complaints.get(feature, [])]
    applied = _applied()
    for feature in wanted:
        if feature not in _targets:
            lines.append(f"{feature}: not registered in this process")
            continue
        named = " ".join(_complaints.get(feature, []))
        hooked = [target for target in _targets[feature] if target not in _relied and target not in named]
        lines += [f"{target}: hook not applied" for target in hooked if target not in applied]
    return lines


def missing(features: Iterable[str] = CAPTURE_FEATURES) -> list[str]:
    """What keeps this process from capturing; empty where every promise is in force."""
    return complaints(features)


def in_force() -> frozenset[str]:
    """Patches whose every function matches and whose every hook is applied."""
    good = [feature for feature in _targets if not complaints([feature])]
    return frozenset(patch for feature in good for patch in PATCHES_OF.get(feature, (feature,)))


_relied: set[str] = set()


def rely(feature: str, target: str, digest: str) -> bool:
    """Like `check`, for a function that is not hooked but whose behaviour a hook assumes."""
    _relied.add(target)
    return check(feature, target, digest)


def _applied() -> set[str]:
    from sglang.srt.plugins.hook_registry import HookRegistry

    registry: Any = HookRegistry
    return registry._patched
