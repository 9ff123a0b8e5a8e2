"""The three digests of a handoff: tensors as they are loaded, the target as it resides, the draft's private bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from miles_ext.tensors import digest, entry
from miles_ext.weights import TensorEntry, combine


class Ledger:
    """Entries of the tensors that one update loaded into the target, by their HF names."""

    def __init__(self) -> None:
        self.received: dict[str, TensorEntry] = {}

    @property
    def digest(self) -> str:
        return combine(self.received) if self.received else ""

    @contextmanager
    def recording(self, model: Any) -> Iterator[None]:
        """Notes every tensor on its way into `model.load_weights`."""
        load = model.load_weights

        def noting(weights: Iterable[tuple[str, Tensor]], *args: Any, **rest: Any) -> Any:
            return load(self._note(weights), *args, **rest)

        model.load_weights = noting
        try:
            yield
        finally:
            del model.load_weights

    def _note(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self.received[name] = entry(tensor)
            yield name, tensor


def resident_digest(model: Any) -> str:
    """Over the engine's own names (fused, sharded); a tied tensor counts once."""
    return digest(model.named_parameters())


def draft_digest(draft_model: Any, target_model: Any) -> str:
    """Over every tensor that the draft does not borrow from the target, its buffers and mask embedding included."""
    borrowed = {tensor.data_ptr() for tensor in target_model.state_dict().values()}
    private = {n: t for n, t in draft_model.state_dict().items() if t.data_ptr() not in borrowed}
    mask = getattr(draft_model, "sc_mask_embedding", None)
    if mask is not None:
        private[f"mask_embedding.{mask[0]}"] = mask[1]
    return digest(private)
