"""What docs/miles.md tells a user to write is what Miles and the adapter read."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from dataclasses import fields
from pathlib import Path

import yaml

from miles_ext.miles_adapter import refusals
from miles_ext.miles_adapter.arguments import Settings, add_arguments, settings_of
from tests.miles.hooks import full_arguments

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "miles.md").read_text()
EXAMPLE = ROOT / "miles_ext" / "miles_adapter" / "example.yaml"
LAUNCH = PAGE.split("```bash")[1].split("```")[0]
MEGATRON = {"--save", "--lr", "--tensor-model-parallel-size"}
RAY = {"--address", "--runtime-env-json", "--"}


def test_the_example_file_is_the_one_on_the_page_and_is_accepted():
    on_page = PAGE.split("```yaml")[1].split("```")[0]
    values = yaml.safe_load(on_page)
    assert values == yaml.safe_load(EXAMPLE.read_text())
    args = full_arguments(**{**values, "sc_head_size": 128})
    refusals.refuse(args)
    assert settings_of(args) == Settings(mode="tis", head_size=128)


def test_every_hook_that_is_named_exists():
    from miles.utils.misc import load_function

    named = set(re.findall(r"miles_ext\.miles_adapter\.\w+\.\w+", PAGE))
    assert len(named) == 4
    for path in named:
        assert callable(load_function(path)), path


def test_every_flag_of_the_launch_lines_is_known(miles_source):
    known = "".join((miles_source / "miles" / name).read_text() for name in ("utils/arguments.py",))
    parser = ArgumentParser()
    add_arguments(parser)
    ours = set(parser._option_string_actions)
    flags = set(re.findall(r"(?<!\S)\"?(--[a-z-]*)", LAUNCH)) - MEGATRON - RAY
    assert len(flags) > 30
    unknown = {flag for flag in flags if flag not in ours and f'"{flag}"' not in known}
    assert {flag for flag in unknown if not flag.startswith("--sglang-")} == set()


def test_the_table_lists_every_setting_with_its_default():
    defaults = {field.name: field.default for field in fields(Settings)}
    rows = [line.split("|")[1:3] for line in PAGE.splitlines() if line.startswith("| `sc_")]
    listed = {}
    for names, values in rows:
        values = [value.strip(" `") for value in values.split(",")]
        listed |= dict(zip(re.findall(r"`sc_(\w+)`", names), values, strict=True))
    assert listed == {name: f"{value:g}" if type(value) is float else str(value).replace("False", "false")
                      for name, value in defaults.items()}  # fmt: skip


def test_every_metric_on_the_page_is_reported():
    from miles_ext.miles_adapter.loss import METRICS

    named = set(re.findall(r"`train/(\w+)`", PAGE))
    assert named <= METRICS.keys() | {"loss", "pg_loss"} and len(named) >= 9
