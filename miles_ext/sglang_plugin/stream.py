"""How the rows of a finished response leave: one message from the scheduler, encoded where HTTP is answered."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from miles_ext.sglang_plugin.plan import REQUEST_KEY
from miles_ext.sglang_plugin.rows import encode


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


def message_of(request: Any) -> list[Any]:
    """The request's rows, once, with its last output; an empty list until then and for requests without capture."""
    rows = getattr(request, "sc_rows", None)
    if rows is None or not request.finished():
        return []
    del request.sc_rows
    return [rows.message()]


def around_update_meta_info(
    original: Callable[..., None],
    manager: Any,
    meta_info: dict[str, Any],
    state: Any,
    customized_info: dict[str, Any],
    index: int,
    finish_reason: Any,
) -> None:
    if REQUEST_KEY in customized_info:
        for message in customized_info[REQUEST_KEY][index]:
            meta_info[REQUEST_KEY] = encode(message)
        customized_info = {key: values for key, values in customized_info.items() if key != REQUEST_KEY}
    if customized_info:
        original(manager, meta_info, state, customized_info, index, finish_reason)
