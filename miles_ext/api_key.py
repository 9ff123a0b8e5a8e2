"""The one key of our HTTP surfaces: read from a file or the environment, never from a command line or a setting."""

from __future__ import annotations

import hmac
import ipaddress
import os
from pathlib import Path

VARIABLE = "MILES_EXT_API_KEY"


def read_key(file: Path | None = None) -> str:
    """The key in `file`, else in MILES_EXT_API_KEY; empty where neither is given. Raises ValueError for a bad one."""
    where = str(file) if file is not None else VARIABLE
    if file is not None and not file.is_file():
        raise ValueError(f"no API key file {file}; accepted: a file with the key as its only line")
    key = (file.read_text() if file is not None else os.environ.get(VARIABLE, "")).strip()
    if file is not None and not key:
        raise ValueError(f"API key file {file} is empty; accepted: a file with the key as its only line")
    if not key.isprintable() or not key.isascii() or " " in key:
        raise ValueError(f"the API key of {where} holds what no HTTP header can; accepted: printable ASCII, one line")
    return key


def headers(key: str) -> dict[str, str]:
    """What a client sends; nothing without a key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def accepts(key: str, authorization: str | None) -> bool:
    """Whether a request with this Authorization header may pass. Takes as long for a near miss as for any other."""
    wanted = headers(key).get("Authorization", "")
    return not wanted or hmac.compare_digest((authorization or "").encode(), wanted.encode())


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it. A name other than localhost counts as open."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
