"""The command line: `python -m experiments COMMAND --help` tells the rest. Exit codes: 0 sound, 1 not, 2 bad input."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from rich.console import Console

    from experiments.config import ExperimentConfig

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# The audit's matrices are small: more threads win nothing, and on a busy machine they spin for minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
terminations: list[int] = []  # signals received
BENCHES = ("rollout", "estimator", "handoff", "load", "scaling")
RESUME = "go on with the last run of this name, with none (default: a new run beside it), or with the run in a folder"
OVERRIDES = """settings:
  --key.sub VALUE    any setting of the file, such as --steps 3, --trainer.lr 1e-4, --seeds '[0, 1, 2]';
                     docs/configuration.md lists them all"""


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser(control="--zero-lr" in words)
    args, rest = parser.parse_known_args(words)
    try:
        settled = args.command in ("run", "submit") or getattr(args, "zero_lr", None) is not None
        args.overrides = parse_overrides(rest, parser, settled)
        signal.signal(signal.SIGTERM, _terminate)
        return args.act(args)
    except KeyboardInterrupt:
        print("interrupted; finished work is on disk, and run --resume auto goes on with it", file=sys.stderr)
        return 128 + (terminations or [signal.SIGINT])[0]
    except (ValueError, OSError, RuntimeError) as error:
        if args.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ValueError, OSError)) else 1


def make_parser(control: bool = False) -> argparse.ArgumentParser:
    """control: the audit is that of --zero-lr, which takes settings and no run."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments", description="Score-centered policy gradients on DFlash rollouts, arm against arm."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, act: object, epilog: str = "") -> argparse.ArgumentParser:
        added = commands.add_parser(
            name, help=text, description=text, epilog=epilog, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        added.add_argument("--debug", action="store_true", help="show the traceback of an error")
        added.set_defaults(act=act)
        return added

    run = command("run", "run every arm of an experiment, then compare, audit and report", run_command, OVERRIDES)
    run.add_argument("config", type=Path, metavar="CONFIG.yaml")
    run.add_argument("--dry-run", action="store_true", help="print the resolved settings and the plan and end")
    run.add_argument("--resume", default="never", metavar="auto|never|PATH", help=RESUME)

    submit = command("submit", "run an experiment as a Ray job and follow it to its end", submit_command, OVERRIDES)
    submit.add_argument("config", type=Path, metavar="CONFIG.yaml")
    submit.add_argument(
        "--address", metavar="URL",
        help="dashboard of the cluster (default: RAY_API_SERVER_ADDRESS, else this machine's Ray, else a new one)",
    )  # fmt: skip
    submit.add_argument("--port", type=int, help="dashboard port of this machine's Ray (default: 8265 where free)")
    submit.add_argument("--dry-run", action="store_true", help="print the resolved settings and the plan and end")
    submit.add_argument("--resume", default="never", metavar="auto|never|PATH", help=RESUME)

    validate = command("validate", "check the claims of the proof table; exit code 1 where one fails", validate_command)
    validate.add_argument("rows", nargs="*", metavar="ROW", help="rows to check (default: all)")
    validate.add_argument("--engine", choices=("embedded", "sglang"), default="embedded")
    validate.add_argument("--quick", action="store_true", help="fewer samples of each claim")
    validate.add_argument("--mutate", action="store_true", help="break each guarded line first: its row must fail")
    validate.add_argument("--cases", type=Path, metavar="FILE", help="cases of the rows filters and estimator")
    validate.add_argument(
        "--config", type=Path, metavar="CONFIG.yaml",
        help="whose section `rollout` says how sglang's servers are started (default: the CPU platform of the tests)",
    )  # fmt: skip
    validate.add_argument("--servers", type=Path, metavar="FOLDER", help="of running sglang servers, to be asked")
    validate.add_argument("--json", type=Path, metavar="FILE")

    bench = command("bench", "measure, as ratios within one run", bench_command)
    bench.add_argument("name", choices=BENCHES)
    bench.add_argument("--quick", action="store_true", help="fewer repetitions")
    bench.add_argument("--seconds", type=float, help="of each soak of `load` (default: 600, or 20 with --quick)")
    bench.add_argument("--json", type=Path, metavar="FILE")

    audit = command("audit", "check a finished run again, from its files alone", audit_command)
    audit.set_defaults(run_dir=None)
    if not control:
        audit.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    audit.add_argument(
        "--zero-lr", type=Path, nargs="?", const=Path("experiments/configs/quickstart.yaml"), metavar="CONFIG.yaml",
        help="run the control with a learning rate of 0: trainer and sampler must score tokens alike (takes settings)",
    )  # fmt: skip
    bundle = command("bundle", "pack a finished run with its manifests and print one SHA-256 over all", bundle_command)
    bundle.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    report = command("report", "compare the arms of a run again and write its report.html", report_command)
    report.add_argument("run_dir", type=Path, metavar="RUN_DIR")

    compare = command("compare", "join runs of several days: a page of their differences", compare_command)
    compare.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR")
    compare.add_argument("--output_dir", type=Path, default=Path("runs/compare"), metavar="DIR")
    mismatch = command("mismatch", "the study of drift under mismatch, 30 minutes at most", mismatch_command)
    mismatch.add_argument("--quick", action="store_true", help="two minutes: that it works, not what it shows")
    mismatch.add_argument("--minutes", type=float, default=28, help="when sampling ends (default: 28)")
    mismatch.add_argument(
        "--output_dir", type=Path, default=Path("runs/mismatch-study"), metavar="DIR",
        help="what it holds already is not run again",
    )  # fmt: skip

    models = command("models", "make the small target, import a model, or train a draft", models_command)
    models.add_argument("what", choices=("make", "import", "train-draft"))
    models.add_argument("arguments", nargs=argparse.REMAINDER, help="`models make --help` lists them")
    return parser


def parse_overrides(rest: Sequence[str], parser: argparse.ArgumentParser, taken: bool) -> list[tuple[str, str]]:
    """`--a.b 1 --c=2` as pairs. ValueError for anything else, or where the command takes no settings."""
    if rest and not taken:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    words, pairs = list(rest), []
    while words:
        word = words.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not key:
            raise ValueError(f"{word!r} is no setting; accepted: --key.sub VALUE")
        if not equals:
            if not words:
                raise ValueError(f"--{key} has no value; accepted: --key.sub VALUE")
            value = words.pop(0)
        pairs.append((key, value))
    return pairs


def run_command(args: argparse.Namespace) -> int:
    from experiments import cluster
    from experiments.config import load

    config = load(args.config, args.overrides)
    if os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") and not config.output_dir.is_absolute():
        # The working directory of a job is a copy that Ray deletes.
        config = config.model_copy(update={"output_dir": Path.home() / config.output_dir})
        print(f"in a Ray job: results go to {config.output_dir}; --output_dir /an/absolute/path chooses another place")
    if args.dry_run:
        return dry_run(config)
    config.model.require_files(config.arms)  # before the imports below, which take seconds
    cluster.stay_on_loopback()
    from experiments.arms import run

    return run(config, _console(), resume=args.resume, debug=args.debug)


def submit_command(args: argparse.Namespace) -> int:
    from experiments.config import load
    from experiments.submit import submit

    if args.dry_run:
        return dry_run(load(args.config, args.overrides))
    return submit(
        args.config, args.overrides, address=args.address, port=args.port, resume=args.resume, console=_console()
    )


def dry_run(config: ExperimentConfig) -> int:
    from experiments.config import dump, plan

    print(dump(config), end="")
    print(plan(config))
    config.model.require_files(config.arms)
    return 0


def validate_command(args: argparse.Namespace) -> int:
    from experiments.validate import main as validate

    return validate(
        args.rows, engine=args.engine, quick=args.quick, mutate=args.mutate, json=args.json, cases=args.cases,
        config=args.config, servers=args.servers,
    )  # fmt: skip


def bench_command(args: argparse.Namespace) -> int:
    from experiments import cluster
    from experiments.evidence import Row, document, print_rows, write_json, write_page

    cluster.stay_on_loopback()  # before Ray is imported
    options = {"quick": args.quick} | ({"seconds": args.seconds} if args.name == "load" else {})
    if args.seconds is not None and args.name != "load":
        raise ValueError(f"--seconds {args.seconds:g} beside bench {args.name}; accepted: bench load alone")
    module = import_module(f"experiments.bench.{args.name}")
    command = f"python -m experiments bench {args.name}{' --quick' if args.quick else ''}"
    names, rows = ("name", "value", "unit", "gate", "pass", "detail"), []
    for found in module.rows(**options):
        row = Row(*(found[name] for name in names))
        rows.append(replace(row, value=math.nan) if row.value is None else row)  # as JSON spells it
        if args.json:
            write_json(args.json, command, rows)  # as they come: what fails or is killed later loses none of them
    print_rows(rows, f"bench {args.name}")
    if args.name == "load" and not args.quick and args.seconds is None:
        write_page(module.PAGE, "Load", module.__doc__ or "", document(command, rows))
    return int(not all(row.passed for row in rows))


def audit_command(args: argparse.Namespace) -> int:
    if args.run_dir is not None:
        from experiments.audit import audit

        return audit(args.run_dir)

    from experiments import cluster
    from experiments.config import load

    config = load(args.zero_lr, args.overrides)
    config.model.require_files(config.arms)
    cluster.stay_on_loopback()
    from experiments.arms import run_control

    return run_control(config, _console(), debug=args.debug)


def bundle_command(args: argparse.Namespace) -> int:
    from experiments.artifacts import bundle

    archive, digest = bundle(args.run_dir)
    print(f"{digest}  {archive}")
    return 0


def report_command(args: argparse.Namespace) -> int:
    from experiments.report import write_report

    print(write_report(args.run_dir))
    return 0


def compare_command(args: argparse.Namespace) -> int:
    from experiments.compare import PAGE_FILE, compare

    for line in compare(args.run_dirs, args.output_dir).left_out:
        print(f"left out: {line}")
    print(args.output_dir / PAGE_FILE)
    return 0


def mismatch_command(args: argparse.Namespace) -> int:
    from experiments.mismatch.study import study

    return study(args.output_dir, quick=args.quick, minutes=args.minutes, say=print)


def models_command(args: argparse.Namespace) -> int:
    module = {"make": "make", "import": "smollm2", "train-draft": "train_draft"}[args.what]
    import_module(f"experiments.models.{module}").main(args.arguments)
    return 0


def _console() -> Console:
    """Tables are 118 columns wide where no terminal says how wide it is."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=118)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Unwind as after Ctrl-C: actors are ended, files closed, the manifest written."""
    del frame
    terminations.append(number)  # Ray raises a plain KeyboardInterrupt of its own, whatever is raised here
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
