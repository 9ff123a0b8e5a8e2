"""Runs the application on a socket that is bound before anything is loaded, in the foreground or in a thread."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import uvicorn
from fastapi import FastAPI

from miles_ext.errors import EngineError


def bind(host: str, port: int) -> socket.socket:
    """A socket on `port` (0 finds a free one). Raises OSError, with what to do, where the port is taken."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free, one in use is not
    try:
        found.bind((host, port))
        found.listen(1024)
    except (OSError, OverflowError) as error:
        found.close()
        reason = error.strerror if isinstance(error, OSError) else "a port is a number from 0 to 65535"
        raise OSError(f"cannot listen on {host}:{port}: {reason}; choose another --port or --host") from error
    return found


def address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


KEEP_ALIVE_S = 75
"""An idle connection is kept for longer than clients keep one (mostly 5 s): who closes first must not be the server,
or a request that is already on its way is lost."""


def server(app: FastAPI, log_level: str) -> uvicorn.Server:
    config = uvicorn.Config(
        app, log_level=log_level, access_log=False, timeout_graceful_shutdown=30, timeout_keep_alive=KEEP_ALIVE_S
    )
    return uvicorn.Server(config)


@contextmanager
def running(app: FastAPI, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """The application's address while it runs in a thread of this process; stopped, with its engine, at the end."""
    bound = bind(host, port)
    uvicorn_server = server(app, log_level="error")
    thread = Thread(target=uvicorn_server.run, kwargs={"sockets": [bound]}, name="http", daemon=True)
    thread.start()
    try:
        while not uvicorn_server.started:
            if not thread.is_alive():
                raise EngineError("the HTTP server ended while it started; its log says why")
            time.sleep(0.005)
        yield address(bound)
    finally:
        uvicorn_server.should_exit = True
        thread.join()
        bound.close()
