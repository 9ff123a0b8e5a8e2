"""Row `collection` and what makes it red."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from experiments.validate import collection as row
from experiments.validate.embedded import EmbeddedEngines
from experiments.validate.settings import Context
from miles_ext import wire
from miles_ext.errors import SupportError
from miles_ext.records import SupportRows
from rollout.server import meta
from tests.rollout.served import serving


def context(scratch: Path) -> Context:
    return Context(engines=EmbeddedEngines(scratch), quick=True, cases=None, scratch=scratch)


def test_all_24_cases_hold_and_every_control_is_refused(tmp_path: Path) -> None:
    rows = row.rows(context(tmp_path))
    assert [(one.name, one.value) for one in rows] == [
        ("collection/dflash2", 24),
        ("collection/dflash2/control_shifted", 24),
        ("collection/dflash2/control_completions", 4),
        ("collection/dflash2/control_router", 2),
    ]
    assert all(one.passed for one in rows)


def shifted(rows: SupportRows, commit: np.ndarray) -> dict:
    return wire.pack(SupportRows.concatenate([rows[1:], rows[:1]]), commit)


def unsampled(rows: SupportRows, commit: np.ndarray) -> dict:
    """A head whose last entry was lost on the way."""
    kept = np.ones(len(rows.token_ids), bool)
    kept[rows.offsets[1:] - 1] = False
    offsets = np.concatenate([[0], np.cumsum(rows.lengths - 1)])
    return wire.pack(
        replace(rows, token_ids=rows.token_ids[kept], logprobs=rows.logprobs[kept], offsets=offsets), commit
    )


@pytest.mark.parametrize("broken", [shifted, unsampled])
@pytest.mark.parametrize("dialect", row.DIALECTS)
def test_a_server_that_loses_the_alignment_is_caught(broken, dialect: str) -> None:
    case = row.Case("direct", dialect, "head32", "stop")
    with serving() as served:
        own = served.engine.generate([case.request])[0]
        row.require(case, row.ask(served.client, case), own, served.model)
        with patch.object(meta, "pack", broken):
            reply = row.ask(served.client, case)
        with pytest.raises(SupportError):
            row.require(case, reply, own, served.model)
