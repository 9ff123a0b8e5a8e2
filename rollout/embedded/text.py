"""Text of token ids: stop strings while decoding, and the trimmed text of a finished response."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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

        Only a tail is decoded: a token carries at least one byte, so no string reaches further back than its bytes.
        """
        window = max(len(string.encode()) for string in strings)
        tail = ids[max(0, len(ids) - new - window) :]
        if not self._contains(tail, strings):
            return None
        old = len(tail) - new
        return next(n for n in range(1, new + 1) if self._contains(tail[: old + n], strings))

    def trimmed(self, ids: NDArray, strings: Sequence[str]) -> str:
        """Text of a response, cut before the first stop string."""
        text = self.decode(ids)
        ends = [at for at in (text.find(string) for string in strings) if at >= 0]
        return text[: min(ends)] if ends else text

    def _contains(self, ids: NDArray, strings: Sequence[str]) -> bool:
        text = self.decode(ids)
        return any(string in text for string in strings)
