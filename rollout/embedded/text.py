"""Text of token ids: stop strings while decoding, and the trimmed text of a finished response."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer


class Text:
    """The tokenizer of a model folder, if it has one (tokenizer.json)."""

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        self.tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else None

    def decode(self, ids: NDArray) -> str:
        """Text without special tokens; empty for a model without a tokenizer."""
        return self.tokenizer.decode(ids.tolist()) if self.tokenizer else ""

    def stop_after(self, ids: NDArray, new: int, strings: Sequence[str]) -> int | None:
        """How many of the last `new` ids are needed to complete the first stop string, or None.

        Only a tail is decoded: a token with text carries at least one byte, so no string reaches further back than as
        many of them as it has bytes. Tokens without text (special ones, ids that no token has) do not count.
        """
        window = max(len(string.encode()) for string in strings)
        before = ids[: len(ids) - new]
        with_text = np.flatnonzero(self._has_text[np.minimum(before, len(self._has_text) - 1)])
        tail = ids[with_text[-window] if len(with_text) >= window else 0 :]
        if not self._contains(tail, strings):
            return None
        old = len(tail) - new
        return next(n for n in range(1, new + 1) if self._contains(tail[: old + n], strings))

    def trimmed(self, ids: NDArray, strings: Sequence[str]) -> str:
        """Text of a response, cut before the first stop string."""
        text = self.decode(ids)
        ends = [at for at in (text.find(string) for string in strings) if at >= 0]
        return text[: min(ends)] if ends else text

    @cached_property
    def _has_text(self) -> NDArray[np.bool_]:
        """Whether a token leaves text, by id; the last entry, False, stands for all ids beyond the tokenizer's."""
        assert self.tokenizer is not None
        ids = list(self.tokenizer.get_vocab().values())
        table = np.zeros(max(ids) + 2, bool)
        table[ids] = True
        table[[id for id, token in self.tokenizer.get_added_tokens_decoder().items() if token.special]] = False
        return table

    def _contains(self, ids: NDArray, strings: Sequence[str]) -> bool:
        text = self.decode(ids)
        return any(string in text for string in strings)
