"""What the front knows of the served model folder: tokenizer, chat template, end tokens, limits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray

from miles_ext.errors import RequestError
from rollout.embedded.text import Text

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Model:
    """folder: a Hugging Face model folder. name: what clients call it. Limits are the engine's."""

    def __init__(self, folder: str | Path, *, vocab_size: int, context_length: int, name: str = "") -> None:
        self.folder = Path(folder).resolve()
        self.name = name or str(self.folder)
        self.vocab_size, self.context_length = vocab_size, context_length
        self.config = _read(self.folder / "config.json")
        self.eos_ids = _eos_ids(_read(self.folder / "generation_config.json") or self.config, self.config)
        self._text = Text(self.folder)
        settings = _read(self.folder / "tokenizer_config.json")
        self._special = {name: _content(settings[name]) for name in SPECIAL_TOKENS if settings.get(name)}
        self._source = _template_source(self.folder / "chat_template.jinja", settings.get("chat_template"))

    @property
    def has_tokenizer(self) -> bool:
        return self._text.tokenizer is not None

    def require_name(self, name: str | None) -> None:
        """Raise RequestError where a request names another model."""
        if name not in (None, "", "default", self.name, str(self.folder)):
            raise RequestError(f'model is "{name}"; accepted: "{self.name}", "default", or leave it out')

    def encode(self, text: str, special_tokens: bool = True) -> NDArray[np.int32]:
        """Token ids int32 [P]. special_tokens: those that the tokenizer puts around a plain text."""
        if self._text.tokenizer is None:
            raise RequestError(f"{self.name} has no tokenizer.json: send token ids, or serve a folder that has one")
        return np.array(self._text.tokenizer.encode(text, add_special_tokens=special_tokens).ids, np.int32)

    def decode(self, ids: NDArray) -> str:
        return self._text.decode(ids)

    def token_text(self, token: int) -> str:
        """Text of one id, special tokens included."""
        return self._text.tokenizer.decode([token], skip_special_tokens=True) if self._text.tokenizer else ""

    def chat_ids(self, messages: Sequence[dict[str, Any]], options: dict[str, Any]) -> NDArray[np.int32]:
        """Token ids of a rendered chat that asks for an answer. options: further names for the template."""
        if self._source is None:
            raise RequestError(f"{self.name} has no chat template: use /generate, or add chat_template.jinja to it")
        names = self._special | {"add_generation_prompt": True} | options
        try:
            rendered = self._template.render(names | {"messages": messages})
        except (TemplateError, TypeError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}") from error
        return self.encode(rendered, special_tokens=False)

    @cached_property
    def _template(self) -> Template:
        """Compiled when a chat first asks for it, with the names and rules that such templates are written for."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self._source or "")


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.is_file() else {}


def _eos_ids(generation: dict[str, Any], config: dict[str, Any]) -> tuple[int, ...]:
    found = generation.get("eos_token_id", config.get("eos_token_id"))
    return () if found is None else (found,) if isinstance(found, int) else tuple(found)


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _template_source(file: Path, inline: str | list[dict[str, str]] | None) -> str | None:
    if file.is_file():
        return file.read_text()
    if isinstance(inline, list):
        return next((one["template"] for one in inline if one["name"] == "default"), None)
    return inline


def _raise(message: str) -> None:
    raise TemplateError(message)
