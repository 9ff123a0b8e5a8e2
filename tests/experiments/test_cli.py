import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from experiments.__main__ import main, make_parser, parse_overrides
from experiments.progress import Follower, step_line
from tests.experiments.cli import ROOT

QUICKSTART = "experiments/configs/quickstart.yaml"


def test_help_and_settings_import_nothing_heavy():
    code = (
        "import sys, experiments.__main__ as m; m.make_parser(); import experiments.config;"
        "print(sorted({'torch', 'ray', 'transformers', 'wandb', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["run", "submit", "validate", "bench", "audit", "report", "models"])
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0 and "usage: python -m experiments" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["run", "submit"])
def test_a_dry_run_prints_settings_and_plan_and_writes_nothing(command, capsys, tmp_path):
    arguments = [command, QUICKSTART, "--dry-run", "--steps", "7", "--output_dir", str(tmp_path / "out")]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert re.search(r"^steps: 7$", out, re.M) and "# each: 7 steps of 16 prompts x 8 responses" in out
    assert f"writes to {tmp_path / 'out' / 'quickstart'}" in out
    assert not (tmp_path / "out").exists()


def test_overrides_come_in_both_spellings_and_may_be_negative():
    parser = make_parser()
    _, rest = parser.parse_known_args(["run", QUICKSTART, "--trainer.lr", "-1", "--dry-run", "--seeds=[1, 2]"])
    assert parse_overrides(rest, parser, True) == [("trainer.lr", "-1"), ("seeds", "[1, 2]")]
    with pytest.raises(ValueError, match="--steps has no value"):
        parse_overrides(["--steps"], parser, True)
    with pytest.raises(ValueError, match="'steps' is no setting"):
        parse_overrides(["steps", "3"], parser, True)


def test_a_command_without_settings_refuses_them(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["report", "somewhere", "--steps", "3"])
    assert ended.value.code == 2 and "unrecognized arguments: --steps 3" in capsys.readouterr().err


def test_debug_shows_the_traceback_that_is_hidden_otherwise(capsys):
    with pytest.raises(ValueError, match="unknown key"):
        main(["run", QUICKSTART, "--stepz", "3", "--debug"])
    assert main(["run", QUICKSTART, "--stepz", "3"]) == 2
    assert capsys.readouterr().err == "error: stepz: unknown key; did you mean steps?\n"


def test_a_job_does_not_write_into_the_copy_that_ray_deletes(monkeypatch, capsys):
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert main(["run", QUICKSTART, "--dry-run"]) == 0
    assert f"writes to {Path.home() / 'runs' / 'quickstart'}" in capsys.readouterr().out


def test_steps_become_bars_in_a_terminal_and_lines_elsewhere():
    metrics = {"rollout/raw_reward": 0.5, "spec/accept_length": 4.25, "rollout/tokens_per_s": 12345.6}
    line = step_line("dflash2-s0", 3, 40, metrics)
    assert line == "[dflash2-s0  3/40] reward 0.500  accept 4.25  tok/s 12,346"
    plain = Console(width=100, record=True, file=open("/dev/null", "w"))
    with Follower(plain) as follower:
        follower.line("job started")
        follower.line(line)
    assert plain.export_text() == f"job started\n{line}\n\n"
    terminal = Console(width=100, record=True, force_terminal=True, file=open("/dev/null", "w"))
    with Follower(terminal) as follower:
        follower.line("job started")
        follower.line(line)
        (task,) = follower._progress.tasks
    assert (task.description, task.completed, task.total) == ("dflash2-s0", 3, 40)
    assert "reward 0.500" not in terminal.export_text().split("\n")[0]
