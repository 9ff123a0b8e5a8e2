import math
import re

from experiments.plots import PANELS, draw
from experiments.report import write_report
from experiments.tracking import write_line
from tests.experiments.test_comparison import arm


def test_the_page_is_self_contained_and_shows_every_arm(tmp_path):
    run = tmp_path / "exp"
    for name, failure in (("regular-s0", ""), ("dflash2-s0", "engine <0> died"), ("dflash2-s1", "")):
        arm(run, name, 1, failure=failure)
    (run / "config.yaml").write_text("arms: [{name: regular}, {name: dflash2}]\nmodel: <tiny>\n")
    html = write_report(run).read_text()
    assert not re.search(r"""(src|href)=["'](?!#)|url\((?!#)|@import|<script""", html), "loads something from outside"
    assert html.count("<figure>") == 3, "reward, held-out reward and throughput were logged"
    assert "Not logged by any arm: " in html and "Accept length" in html
    assert "dflash2-s0 failed after 8 steps: engine &lt;0&gt; died" in html and "model: &lt;tiny&gt;" in html
    assert html.index("regular-s0") < html.index("dflash2-s1"), "arms stand in the order of the config"
    ids = re.findall(r'\bid="([^"]*)"', html)
    plots = [name for name in ids if not name.startswith("key")]
    assert len(plots) == len(set(plots)), "a clip path of one plot would cut another"


def test_colours_follow_the_page_and_a_seed_is_a_line():
    panel = PANELS[0]
    runs = {"a": [{panel.metrics[0]: {0: 1.0, 1: 2.0}}, {panel.metrics[0]: {0: 1.0, 1: 3.0}}], "b": [{}]}
    svg = draw(panel, runs)
    assert svg and svg.count("stroke: var(--arm-0); stroke-width: 1.5") == 2 and "currentColor" in svg
    assert not re.search(r"#0102", svg)


def test_values_that_are_not_finite_are_named(tmp_path):
    folder = arm(tmp_path / "exp", "regular-s0", 1)
    with (folder / "metrics.jsonl").open("a") as file:
        write_line(file, 8, {"train/grad_norm": math.inf})
    assert "regular-s0 logged values that are not finite (1)" in write_report(tmp_path / "exp").read_text()


def test_nothing_to_draw_is_none():
    assert draw(PANELS[0], {"a": [{}]}) is None
