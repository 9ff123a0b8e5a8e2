"""Pydantic's errors as lines that a person can act on."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """One line a problem: dotted key, value, what is accepted; for an unknown key the nearest known one."""
    known = list(dotted_keys(model))
    problems = error.errors(include_url=False)
    parents = {problem["loc"][:depth] for problem in problems for depth in range(len(problem["loc"]))}
    leaves = [problem for problem in problems if problem["loc"] == () or problem["loc"] not in parents]
    return "\n".join(_line(problem, known) for problem in leaves)


def dotted_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of a settings model, sections before what is in them."""
    for name, field in model.model_fields.items():
        yield prefix + name
        section = section_of(field.annotation)
        if section is not None:
            yield from dotted_keys(section, f"{prefix}{name}.")


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The settings model that a field holds, alone or as a list, or None."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _line(problem: Any, known: list[str]) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        plain = ".".join(part for part in key.split(".") if not part.isdigit())
        return f"{key}: unknown key; {_nearest(plain, known)}"
    if problem["type"] == "missing":
        return f"{key}: missing; it has no default"
    message = problem["msg"].removeprefix("Value error, ")
    where = f"{key}: " if key else ""
    value = problem["input"]
    shown = "" if isinstance(value, (dict, list, BaseModel)) else f"{value!r} is refused: "
    return f"{where}{shown}{message[:1].lower()}{message[1:]}"


def _nearest(key: str, known: list[str]) -> str:
    section, _, last = key.rpartition(".")
    by_name = {name.rpartition(".")[2]: name for name in known}
    siblings = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == section]
    close = [by_name[last]] if last in by_name else []  # the right name under the wrong section
    if not close:
        close = [f"{section}.{name}".lstrip(".") for name in difflib.get_close_matches(last, siblings, n=1)]
    if not close:
        close = [by_name[name] for name in difflib.get_close_matches(last, by_name, n=1)]
    return f"did you mean {close[0]}?" if close else "docs/configuration.md lists the accepted ones"
