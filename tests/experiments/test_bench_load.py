"""The soak in short: real server, real pool, 64 clients."""

from __future__ import annotations

import pytest

from experiments.bench.load import Ledger, Memory, question, soak_server


@pytest.mark.slow
def test_no_request_is_lost_under_load() -> None:
    rows = {row.name: row for row in soak_server(8.0)}
    assert not [row for row in rows.values() if not row.passed]
    assert rows["load/http_requests"].value > 64


def test_what_is_lost_twice_or_foreign_is_red() -> None:
    ledger = Ledger()
    for name in ("a", "b"):
        ledger.send(question(name, 1))
    ledger.take("a", [1], 0.1)
    ledger.take("a", [1], 0.1)
    ledger.take("c", [1], 0.1)
    rows = {row.name: row for row in ledger.rows("x", 1.0)}
    assert (rows["load/x_lost"].value, rows["load/x_twice_or_foreign"].value) == (1, 2)
    for name in ("lost", "twice_or_foreign", "same_as_alone"):
        assert not rows[f"load/x_{name}"].passed


def test_memory_that_grows_or_was_never_seen_is_red() -> None:
    memory = Memory(0.0)
    assert not memory.row("m").passed
    memory.before, memory.after = [100.0], [105.1]
    assert not memory.row("m").passed
    memory.after = [104.9]
    assert memory.row("m").passed
