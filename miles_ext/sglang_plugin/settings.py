"""Settings of the plugin, from the environment: sglang gives a plugin no server flags of its own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, cast, get_args

from miles_ext.sampling import FilterOrder

ORDER_VARIABLE = "MILES_SC_FILTER_ORDER"
STRICT_VARIABLE = "MILES_SC_STRICT"
ENGINE_ID_VARIABLE = "MILES_SC_ENGINE_ID"
Switch = Literal["0", "1"]


@dataclass(frozen=True, slots=True)
class Settings:
    """filter_order: of every request this server samples. strict: refuse what would be sampled from another law."""

    filter_order: FilterOrder = "top_k_first"
    strict: bool = True
    engine_id: str = ""


def read_settings() -> Settings:
    """Raise ValueError for a variable that holds none of the accepted values."""
    order = _choice(ORDER_VARIABLE, get_args(FilterOrder), "top_k_first")
    strict = _choice(STRICT_VARIABLE, get_args(Switch), "1")
    return Settings(cast(FilterOrder, order), strict == "1", os.environ.get(ENGINE_ID_VARIABLE, ""))


def _choice(variable: str, accepted: tuple[str, ...], default: str) -> str:
    value = os.environ.get(variable, default)
    if value not in accepted:
        raise ValueError(f"{variable} is {value!r}; accepted: {', '.join(accepted)}")
    return value
