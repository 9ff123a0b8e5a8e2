"""Checkpoints that the engine's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rollout.tiny import write_draft, write_target


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return write_draft(tmp_path_factory.mktemp("draft"), target)
