"""`python -m rollout.server --target DIR [--draft DIR] [--arm dflash2] --port N`"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import get_args

from miles_ext.api_key import VARIABLE, is_loopback, read_key
from miles_ext.capability import ArmKind
from rollout.server.running import address, bind, server


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=options.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    try:
        key = read_key(options.api_key_file)
        bound = bind(options.host, options.port)
    except (OSError, ValueError) as error:
        print(f"rollout.server: {error}", file=sys.stderr)
        return 1
    if not key and not is_loopback(options.host):
        print(f"rollout.server: {options.host} can be reached from elsewhere and no API key is set; set {VARIABLE} or "
              "--api-key-file", file=sys.stderr)  # fmt: skip
    with bound:
        from rollout.embedded.engine import EmbeddedEngine  # a taken port is reported before torch loads
        from rollout.server.app import make_app
        from rollout.server.model import Model

        try:
            engine = EmbeddedEngine(
                options.target,
                options.draft,
                options.arm,
                device=options.device,
                dtype=options.dtype,
                max_concurrency=options.max_concurrency,
                context_length=options.context_length,
                engine_id=options.engine_id,
                threads=options.threads,
            )
            model = Model(
                options.target,
                vocab_size=engine.vocab_size,
                context_length=engine.context_length,
                name=options.served_model_name,
            )
        except ValueError as error:
            print(f"rollout.server: {error}", file=sys.stderr)
            return 1
        print(f"{engine.kind} engine {engine.engine_id} serves {model.name} at {address(bound)}", flush=True)
        server(make_app(engine, model, api_key=key), options.log_level).run(sockets=[bound])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m rollout.server", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--target", required=True, help="model folder in the Hugging Face layout")
    add("--draft", help="draft folder; the arms dflash and dflash2 need one")
    add("--arm", choices=get_args(ArmKind), default="regular")
    add("--host", default="127.0.0.1", help="any but loopback wants an API key")
    add("--api-key-file", type=Path, help=f"file with the key that clients must send (default: ${VARIABLE})")
    add("--port", type=int, default=30000, help="0 takes a free port and prints it")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    add("--max-concurrency", type=int, default=128, help="responses decoded at once, and requests that share a batch")
    add("--context-length", type=int, default=512, help="prompt plus response, in tokens")
    add("--threads", type=int, help="torch threads")
    add("--served-model-name", default="", help="what clients call the model; default: the folder")
    add("--engine-id", default="")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="warning")
    return parser


if __name__ == "__main__":
    sys.exit(main())
