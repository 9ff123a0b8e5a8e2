"""Fixtures of the tests that need the environment with sglang (marker `sglang`)."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def plugin() -> None:
    """The installed sglang with the plugin loaded through its entry point, as in every sglang process."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
