"""Tests of this folder run in the environment that has sglang (run.sh), and are not collected in any other."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("sglang") else ["test_*.py"]


@pytest.fixture(scope="session")
def plugin() -> None:
    """The installed sglang with the plugin loaded through its entry point, as in every sglang process."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
