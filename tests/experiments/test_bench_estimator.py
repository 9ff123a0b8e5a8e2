"""What `bench` does with measurements that cannot be taken: a peer that raises, a section that fails, a late crash."""

import json
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments import __main__ as cli
from experiments.bench.device import Step
from experiments.bench.estimator_page import page
from experiments.bench.estimator_peers import runnable
from experiments.evidence import document, guarded, not_measured, report


def test_a_peer_that_raises_is_kept_with_what_it_said():
    expected = torch.ones(4, 3, dtype=torch.float64)

    def absent() -> Any:
        return import_module("no_such_peer")

    steps = {"ours": Step(lambda: (torch.ones(4, 3),)), "peer": Step(absent), "off": Step(lambda: (torch.zeros(4, 3),))}
    errors, failed = runnable(steps, expected)
    assert errors == {"ours": 0.0, "off": 1.0}
    assert set(failed) == {"peer"} and "no_such_peer" in failed["peer"]


def bench(monkeypatch, tmp_path, rows) -> tuple[list[str], dict[str, Any]]:
    file = tmp_path / "rows.json"
    monkeypatch.setattr(cli, "import_module", lambda name: SimpleNamespace(rows=rows))
    return ["bench", "estimator", "--json", str(file)], {"file": file}


def test_rows_without_a_figure_are_printed_and_kept(monkeypatch, tmp_path, capsys):
    def section() -> Iterator[Any]:
        yield report("estimator/first", 2.0)
        raise RuntimeError("device lost")

    def rows(quick: bool) -> Iterator[dict[str, Any]]:
        yield not_measured("estimator/peer", "ImportError: none here").as_json()
        for row in guarded("estimator/section", section):
            yield row.as_json()
        yield report("estimator/last", float("nan")).as_json()

    command, where = bench(monkeypatch, tmp_path, rows)
    assert cli.main(command) == 1
    shown = capsys.readouterr().out
    assert "none here" in shown and "device lost" in shown and "failed: estimator/section_ran" in shown
    found = {row["name"]: row for row in json.loads(where["file"].read_text())["rows"]}
    assert list(found) == ["estimator/peer", "estimator/first", "estimator/section_ran", "estimator/last"]
    assert found["estimator/peer"]["value"] == 0 and found["estimator/first"]["value"] == 2
    assert not found["estimator/section_ran"]["pass"]


def test_a_late_failure_loses_no_row(monkeypatch, tmp_path):
    def rows(quick: bool) -> Iterator[dict[str, Any]]:
        yield report("estimator/first", 2.0).as_json()
        raise MemoryError

    command, where = bench(monkeypatch, tmp_path, rows)
    with pytest.raises(MemoryError):
        cli.main(command)
    assert [row["name"] for row in json.loads(where["file"].read_text())["rows"]] == ["estimator/first"]


def test_the_page_holds_every_row_once():
    names = (
        "cuda_copy",
        "cuda_scan/b1024",
        "cuda_peer_logits/liger",
        "cuda_centered_over_plain_v1",
        "cuda_scan_fastest",
    )
    rows = [report(f"estimator/{name}", 1.0, detail="d") for name in names]
    text = page({"One GPU": document("python -m experiments bench estimator", rows)})
    assert all(text.count(f"| estimator/{name} |") == 1 for name in names)
