"""How the rows of a response leave: in pieces from the scheduler, encoded once, where HTTP is answered."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from miles_ext.sglang_plugin.plan import REQUEST_KEY
from miles_ext.sglang_plugin.rows import Piece, encode


def around_streamer_class(original: Callable[..., type], scheduler: Any) -> type:
    return streamer_class(original(scheduler))


@cache
def streamer_class(base: type) -> type:
    """sglang's documented extension: a streamer that adds request-level fields to what it emits."""

    def build(_streamer: Any, reqs: list[Any]) -> dict[str, list[Any]]:
        messages = [message_of(request) for request in reqs]
        return {REQUEST_KEY: messages} if any(messages) else {}

    members = {"has_additional_customized_info": True, "build_additional_customized_info": build}
    return type("RowStreamer", (base,), members)


def message_of(request: Any) -> list[Piece]:
    """The rows that joined since the request's last output: sglang sends one every 50 tokens, so most of a response
    has crossed before its last token. An empty list for a request without capture."""
    rows = getattr(request, "sc_rows", None)
    return [rows.take()] if rows is not None and len(rows) else []


def around_update_meta_info(
    original: Callable[..., None],
    manager: Any,
    meta_info: dict[str, Any],
    state: Any,
    customized_info: dict[str, Any],
    index: int,
    finish_reason: Any,
) -> None:
    """Keeps the pieces beside the request's state and encodes them once, with its last output."""
    if REQUEST_KEY in customized_info:
        pieces = state.__dict__.setdefault("sc_pieces", [])
        pieces += customized_info[REQUEST_KEY][index]
        customized_info = {key: values for key, values in customized_info.items() if key != REQUEST_KEY}
    if finish_reason is not None and getattr(state, "sc_pieces", None):
        meta_info[REQUEST_KEY] = encode(state.sc_pieces)
        state.sc_pieces = []
    if customized_info:
        original(manager, meta_info, state, customized_info, index, finish_reason)
