"""docs/configuration.md from the settings themselves: `make docs` writes it, CI checks that it is current."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from experiments.config import ArmConfig, ExperimentConfig
from experiments.config_errors import section_of

HEADER = """# Settings

Every setting of an experiment file, as it is spelt on the command line (`--trainer.lr 1e-4`) and nested in YAML.
An unknown key is an error that names the nearest known one. `python -m experiments run FILE --dry-run` prints them
all, resolved. Written by `make docs` from the settings themselves.
"""


def reference() -> str:
    """The page: one table a section."""
    parts = [HEADER, *_tables(ExperimentConfig, "")]
    parts += [f"## arms\n\n{_doc(ArmConfig)}\n", _table(ArmConfig, "")]
    return "\n".join(parts)


def _tables(model: type[BaseModel], prefix: str) -> Iterator[str]:
    if prefix:
        yield f"## {prefix.removesuffix('.')}\n\n{_doc(model)}\n"
    yield _table(model, prefix)
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is not None and section is not ArmConfig:
            yield from _tables(section, f"{prefix}{name}.")


def _table(model: type[BaseModel], prefix: str) -> str:
    schema = model.model_json_schema()
    lines = ["| key | accepted | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is not None and section is not ArmConfig:
            continue
        accepted = "a list, see [arms](#arms)" if section is ArmConfig else _accepted(schema["properties"][name])
        default = "required" if field.is_required() else f"`{_spelt(schema['properties'][name].get('default'))}`"
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        lines.append(f"| `{prefix}{name}` | {accepted} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def _accepted(schema: dict[str, Any]) -> str:
    """The JSON schema of one setting in words."""
    if "anyOf" in schema:
        return " or ".join(_accepted(part) for part in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{_spelt(value)}`" for value in schema.get("enum", [schema.get("const")]))
    limits = [
        f"{sign} {schema[key]:g}"
        for key, sign in (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
        if key in schema
    ]
    names = {"number": "number", "integer": "integer", "boolean": "true, false", "array": "list", "object": "mapping"}
    kind = "path" if schema.get("format") == "path" else names.get(schema.get("type", ""), str(schema.get("type")))
    return " ".join([kind, *limits])


def _spelt(value: Any) -> str:
    return str(value) if isinstance(value, str) else json.dumps(value)


def _doc(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split())


if __name__ == "__main__":
    print(reference(), end="")
