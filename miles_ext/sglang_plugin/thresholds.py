"""Keeps the acceptance thresholds at 1.0 while the server runs: any other value loosens acceptance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miles_ext.sglang_plugin.settings import read_settings


def around_validate(original: Callable[..., None], controller: Any, key: str, value: Any) -> None:
    from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected

    if read_settings().strict and float(value) != 1.0:
        raise UpdateRejected(f"{key} = {value} loosens acceptance; a strict server accepts 1.0 only")
    original(controller, key, value)
