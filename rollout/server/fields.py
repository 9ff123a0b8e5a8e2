"""Request bodies: every field is honoured exactly, known to ask for nothing, or refused with the reason."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from miles_ext.errors import RequestError

# What sglang-router 0.3.2 drops on its way to a worker. `session_params` passes through it whole, so these fields may
# travel inside; this server keeps no sessions, and nothing else is accepted there.
CARRIER = "session_params"
CARRIED = frozenset(
    {"custom_params", "return_meta_info", "return_token_ids", "return_sampling_mask", "sampling_logprobs_mode"}
)


class Body(BaseModel):
    """A JSON object of a request. Subclasses declare the fields they honour.

    OFF: other known fields: the one value of each that asks for nothing, and why no other can be honoured.
    INERT: known fields that never change an answer.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    OFF: ClassVar[dict[str, tuple[Any, str]]] = {}
    INERT: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def read(cls, body: Any, where: str) -> Self:
        """Parse `body`; null means left out. Raises RequestError naming the field, its value and what is accepted."""
        if not isinstance(body, dict):
            raise RequestError(f"{where} is {brief(body)}; accepted: a JSON object")
        asked = {}
        for name, value in body.items():
            if name in cls.model_fields:
                if value is not None:
                    asked[name] = value
            elif name in cls.OFF:
                off, reason = cls.OFF[name]
                if value is not None and value != off:
                    raise RequestError(
                        f"{where}: {name} is {brief(value)}: {reason}; accepted: {brief(off)}, or leave it out"
                    )
            elif name not in cls.INERT:
                raise RequestError(
                    f"{where}: field {name!r} is unknown, and what is not understood cannot be honoured; "
                    f"accepted: {', '.join(sorted(cls.model_fields))}"
                )
        try:
            return cls.model_validate(asked)
        except ValidationError as error:
            raise RequestError(f"{where}: {complaints(error)}") from error


def lift(body: Any, where: str) -> dict[str, Any]:
    """`body` with the fields carried inside `session_params` in their places."""
    if not isinstance(body, dict):
        raise RequestError(f"{where} is {brief(body)}; accepted: a JSON object")
    lifted = dict(body)
    carried = lifted.pop(CARRIER, None)
    if carried is None:
        return lifted
    if not isinstance(carried, dict) or not carried.keys() <= CARRIED:
        raise RequestError(
            f"{where}: {CARRIER} is {brief(carried)}: sessions are not kept; accepted: an object with any of "
            f"{', '.join(sorted(CARRIED))}"
        )
    twice = sorted(carried.keys() & lifted.keys())
    if twice:
        raise RequestError(f"{where}: {', '.join(twice)} in {CARRIER} and beside it; give it once")
    return lifted | carried


def complaints(error: ValidationError) -> str:
    """What pydantic found, one clause a field."""
    return "; ".join(
        f"{'.'.join(map(str, one['loc'])) or 'value'} is {brief(one['input'])}: {one['msg']}" for one in error.errors()
    )


def brief(value: Any) -> str:
    """A value as JSON spells it, cut to a line."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 120 else f"{text[:117]}..."
