"""Fields that a gateway drops on their way, taken out of the one that it forwards whole.

sglang-router 0.3.2 passes on the fields that it knows, which `custom_params`, `return_meta_info` and `return_token_ids`
are not, and `session_params` as it is. A request may therefore carry them in there, as with `rollout.server`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miles_ext.sglang_plugin.plan import REQUEST_KEY

PARAMS = "custom_params"
CARRIED = frozenset({PARAMS, "return_meta_info", "return_token_ids"})
NO_ROWS = "/v1/completions has no place for sampling rows; use /generate or /v1/chat/completions"


def around_normalize(original: Callable[..., None], request: Any) -> None:
    """`/generate`: custom_params move into the sampling parameters of every prompt."""
    carried = take(request)
    if PARAMS in carried:
        request.sampling_params = _placed(request.sampling_params, carried[PARAMS])
    original(request)


def around_handle_request(original: Callable[..., Any], serving: Any, request: Any, raw_request: Any) -> Any:
    """The OpenAI dialects: every carried field is one of the request itself. Returns sglang's coroutine."""
    for name, value in take(request).items():
        setattr(request, name, value)
    if REQUEST_KEY in (getattr(request, PARAMS, None) or {}) and hasattr(request, "prompt"):
        return _refusal(serving)
    return original(serving, request, raw_request)


async def _refusal(serving: Any) -> Any:
    return serving.create_error_response(NO_ROWS)


def take(request: Any) -> dict[str, Any]:
    """Removes and returns the carried fields of `session_params`; those of a session stay."""
    found = getattr(request, "session_params", None)
    if not isinstance(found, dict) or not found.keys() & CARRIED:
        return {}
    rest = {name: value for name, value in found.items() if name not in CARRIED}
    request.session_params = rest or None
    return {name: found[name] for name in found.keys() & CARRIED}


def _placed(params: Any, carried: Any) -> Any:
    """params: None, one mapping or one a prompt. ValueError, which sglang answers with 400, where one has its own."""
    if isinstance(params, list):
        return [_placed(one, carried) for one in params]
    if (params or {}).get(PARAMS) not in (None, carried):
        raise ValueError(f"{PARAMS} in session_params and in sampling_params; give them once")
    return {**(params or {}), PARAMS: carried}
