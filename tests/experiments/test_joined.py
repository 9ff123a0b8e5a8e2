"""Runs of several folders joined: what is paired, what is named and left out, and the page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from experiments.__main__ import main
from experiments.compare import compare
from experiments.joined import join
from experiments.tracking import write_line
from tests.experiments.test_comparison import arm

FINAL = {"on": (0.1, 0.11, 0.12), "diagnose": (0.01, 0.02, 0.02)}  # reward a step, by seed


def study(run: Path, seeds=(0, 1, 2), family: str = "int4", **settings) -> Path:
    for seed in seeds:
        for member, slopes in FINAL.items():
            folder = arm(run, f"{family}-{member}-s{seed}", seed, reward=slopes[seed], **settings)
            with (folder / "metrics.jsonl").open("a") as file:
                write_line(file, 7, {"train/entropy": 1.0, "sc/correction_norm": 0.5})
    return run


def test_centering_is_compared_with_its_control_seed_by_seed(tmp_path: Path):
    joined = join([study(tmp_path / "a")])
    (family,) = joined.families
    assert (family.name, family.treated, family.control) == ("int4", "int4-on", "int4-diagnose")
    treated, control, difference = family.figures["reward"]
    assert treated.mean == pytest.approx(0.11 * 6.5) and control.mean == pytest.approx(0.05 / 3 * 6.5)
    assert difference.mean == pytest.approx(6.5 * (0.09 + 0.09 + 0.10) / 3) and difference.shown == "shown"
    assert family.figures["trained"] if "trained" in family.figures else True
    assert joined.left_out == [] and len(joined.runs) == 6


def test_every_run_is_accounted_for_and_what_is_no_pair_is_named(tmp_path: Path):
    run = study(tmp_path / "a")
    arm(run, "int4-on-s3", 3, failure="the engine died")
    arm(run, "int4-diagnose-s3", 3)
    arm(run, "int4-on-s4", 4)
    arm(run, "int4-diagnose-s4", 4, digit="1")
    arm(run, "int4-on-s5", 5)
    arm(run, "int4-diagnose-s5", 5, shift=1)
    (arm(run, "int4-on-s6", 6) / "manifest.json").unlink()
    joined = join([run])
    assert len(joined.runs) == 13 and joined.families[0].seeds == (0, 1, 2)
    named = "\n".join(joined.left_out)
    assert "int4-on-s3 failed: the engine died" in named and "int4-on-s6 unfinished" in named
    assert "seed 4 is not paired: they began from different weights" in named
    assert "seed 5 is not paired: they saw different prompts" in named
    page = compare([run], tmp_path / "out") and (tmp_path / "out" / "report.html").read_text()
    assert all(line in page for line in joined.left_out) and all(f"{r.arm}-s{r.seed}" in page for r in joined.runs)


def test_runs_of_several_days_are_joined(tmp_path: Path):
    first, second = study(tmp_path / "monday", seeds=(0,)), study(tmp_path / "tuesday", seeds=(1, 2))
    (family,) = join([first, second]).families
    assert family.seeds == (0, 1, 2)
    again = join([first, study(tmp_path / "friday", seeds=(0,))])
    assert [family.name for family in again.families] == ["monday:int4", "friday:int4"], "the same arm and seed again"
    with pytest.raises(ValueError, match="holds no arm"):
        join([tmp_path])


def test_the_page_shows_who_drifts_and_loads_nothing(tmp_path: Path, capsys):
    run = study(study(tmp_path / "a"), family="<b>")
    assert main(["compare", str(run), "--output_dir", str(tmp_path / "out")]) == 0
    assert str(tmp_path / "out" / "report.html") in capsys.readouterr().out
    page = (tmp_path / "out" / "report.html").read_text()
    assert "2 of 2 comparisons drift without centering" in page and page.count('<figure class="drifts">') == 2
    assert not re.search(r"""(src|href)=["'](?!#)|url\((?!#)|@import|<script""", page), "loads something from outside"
    assert "&lt;b&gt;" in page and "<b>-on" not in page
    assert page.count("<polyline") == 2 + 2 * 2 * 8, (
        "two keys; families, plots, and three seeds and a mean on each side"
    )
    document = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert len(document["runs"]) == 12 and document["families"][0]["figures"]["reward"][2]["count"] == 3
