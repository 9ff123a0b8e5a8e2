"""The one function that makes q: the law of the next token after temperature, top-k and top-p.

The regular sampler, the speculative verifier and the capture all use the tensor that `law` returns, so a recorded
law is the sampling law by construction and not by agreement between implementations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from miles_ext.sampling import FilterOrder

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from numpy.typing import ArrayLike, NDArray

NARROW = 2048  # a nucleus is first looked for among this many of the largest logits


@dataclass(frozen=True)
class Filters:
    """What each of n rows asks for: checked once, and copied to the device once, for as many steps as they last.

    heat: temperature float64 [n], 0 for greedy. k: int64 [n], clamped to v. p: float64 [n]. See `law`.
    """

    heat: NDArray[np.float64]
    k: NDArray[np.int64]
    p: NDArray[np.float64]
    filter_order: FilterOrder
    v: int

    @classmethod
    def of(
        cls,
        logits: Tensor,
        temperature: ArrayLike | Tensor = 1.0,
        top_k: ArrayLike | Tensor = 0,
        top_p: ArrayLike | Tensor = 1.0,
        filter_order: FilterOrder = "top_k_first",
    ) -> Filters:
        n, v = logits.shape
        if filter_order not in get_args(FilterOrder):
            raise ValueError(f"filter_order {filter_order!r}; accepted: {', '.join(get_args(FilterOrder))}")
        heat = _host_rows(temperature, n, np.float64, "temperature")
        k = _host_rows(top_k, n, np.int64, "top_k")
        p = _host_rows(top_p, n, np.float64, "top_p")
        _refuse(heat, (heat >= 0) & (heat < np.inf), "temperature", "a finite number >= 0")
        _refuse(p, p > 0, "top_p", "a number > 0, where >= 1 means off")
        return cls(heat, np.where((k <= 0) | (k >= v), v, k), p, filter_order, v)

    @cached_property
    def greedy(self) -> NDArray[np.bool_]:
        return self.heat == 0

    @cached_property
    def filtered(self) -> NDArray[np.int64]:
        """Rows that a filter touches."""
        return np.flatnonzero(((self.k < self.v) | (self.p < 1)) & ~self.greedy)

    def on(self, device: torch.device) -> DeviceFilters:
        if device not in self._copies:
            touched = np.flatnonzero((self.k < self.v) | (self.p < 1) | self.greedy)
            rows, heats, ks, ps = (
                _to(a, device) for a in (touched, self.heat[touched], self.k[touched], self.p[touched])
            )
            plain = (self.heat == 1).all() or len(touched) == len(self.heat)
            column = None if plain else _to(np.where(self.greedy, 1.0, self.heat)[:, None], device).float()
            self._copies[device] = DeviceFilters(rows, heats, ks, ps, column)
        return self._copies[device]

    @cached_property
    def _copies(self) -> dict[torch.device, DeviceFilters]:
        return {}


class DeviceFilters(NamedTuple):
    """The rows that a filter or temperature 0 touches, what they ask for, and a column of all temperatures unless 1."""

    rows: Int[Tensor, " r"]
    heat: Float[Tensor, " r"]
    k: Int[Tensor, " r"]
    p: Float[Tensor, " r"]
    column: Float[Tensor, "n 1"] | None


def law(
    logits: Float[Tensor, "n v"],
    temperature: ArrayLike | Tensor = 1.0,
    top_k: ArrayLike | Tensor = 0,
    top_p: ArrayLike | Tensor = 1.0,
    filter_order: FilterOrder = "top_k_first",
) -> Float[Tensor, "n v"]:
    """Probabilities of the next token, float32 [n, v] (float64 for float64 logits).

    temperature (>= 0), top_k (off when <= 0 or >= v), top_p (> 0, off when >= 1): one number or one a row. Host
    values (numbers, lists, numpy) cost no device synchronisation; device tensors are copied to the host.

    top-k keeps the k largest logits, top-p the tokens whose strictly more likely mass lies below p; both keep every
    tie of the last kept token, a tie being equality of the raw logits in working precision (float32, or float64).
    `top_k_first` measures p on the renormalised top-k law, `joint` on the unfiltered one. A row that no filter
    touches is softmax(logits / temperature), bit for bit, whatever its neighbours ask for. Temperature 0 (evaluation
    only) puts all mass on the largest logit, the lowest id among ties, and ignores the filters.

    A row with NaN, +inf or no finite logit comes out as NaN throughout: see `invalid`. -inf marks a forbidden token.
    """
    return filtered_law(logits, Filters.of(logits, temperature, top_k, top_p, filter_order))


def filtered_law(logits: Float[Tensor, "n v"], filters: Filters) -> Float[Tensor, "n v"]:
    """`law` for filters that were prepared before: on a GPU one launch, and one or two more for unfiltered rows."""
    z = logits.detach()
    if z.is_cuda and z.dtype != torch.float64 and z.stride(1) == 1 and len(z):
        return _law_on_gpu(z, filters)
    z = z if z.dtype == torch.float64 else z.float()
    heat, k, p, greedy, rows = filters.heat, filters.k, filters.p, filters.greedy, filters.filtered
    n = len(z)
    any_greedy = greedy.any()
    scaled = _divide(z, np.where(greedy, 1.0, heat) if any_greedy else heat)
    if len(rows):
        chosen = _rows(z, rows)
        kept = _rows(scaled, rows).masked_fill(
            chosen < _cutoffs(chosen, heat[rows], k[rows], p[rows], filters.filter_order), -torch.inf
        )
        scaled = kept if len(rows) == n else scaled.index_copy(0, _to(rows, z.device), kept)
    probs = torch.softmax(scaled, dim=-1)
    if any_greedy:
        at = _to(np.flatnonzero(greedy), z.device)
        hot = torch.zeros_like(z[at]).scatter_(1, z[at].argmax(-1, keepdim=True), 1.0)
        probs = probs.index_copy(0, at, hot + 0.0 * probs[at])  # 0 * NaN keeps an invalid row invalid
    return probs


def _law_on_gpu(z: Float[Tensor, "n v"], filters: Filters) -> Float[Tensor, "n v"]:
    from miles_ext.law_kernels import filter_rows

    rows, heat, k, p, column = filters.on(z.device)
    if len(rows) == len(z):
        probs = torch.empty(z.shape, dtype=torch.float32, device=z.device)
    else:
        probs = torch.softmax(z if column is None else z / column, dim=-1, dtype=torch.float32)
    if len(rows):
        filter_rows(z, probs, rows, heat, k, p, filters.filter_order == "joint")
    return probs


def _cutoffs(
    z: Float[Tensor, "r v"], heat: NDArray, k: NDArray, p: NDArray, filter_order: FilterOrder
) -> Float[Tensor, "r 1"]:
    """Smallest raw logit that each row keeps. Both filters cut a falling order, so one threshold says it all."""
    v = z.shape[1]
    with_k, nucleus = np.flatnonzero(k < v), np.flatnonzero(k == v)
    if len(nucleus) == 0:
        return _threshold(z, heat, k, p, filter_order, width=int(k.max()))[0]
    cut = z.new_empty(z.shape[0], 1)
    if len(with_k):
        part = (_rows(z, with_k), heat[with_k], k[with_k], p[with_k])
        cut.index_copy_(0, _to(with_k, z.device), _threshold(*part, filter_order, width=int(k[with_k].max()))[0])
    # Most nuclei are narrow, and on a CPU a full sort of a large vocabulary costs more than a small model.
    for width in (NARROW, v) if z.device.type == "cpu" and v > NARROW else (v,):
        if len(nucleus):
            part = (_rows(z, nucleus), heat[nucleus], k[nucleus], p[nucleus])
            found, settled = _threshold(*part, filter_order, width=width)
            cut.index_copy_(0, _to(nucleus, z.device), found)
            nucleus = nucleus[~settled.numpy()] if width < v else nucleus
    return cut


def _threshold(
    z: Float[Tensor, "r v"], heat: NDArray, k: NDArray, p: NDArray, filter_order: FilterOrder, width: int
) -> tuple[Float[Tensor, "r 1"], Bool[Tensor, " r"]]:
    """Cutoffs from the `width` largest logits, and where they settle the matter (always, with width >= k)."""
    top = _largest(z, width)
    last = _to(np.minimum(k, width)[:, None] - 1, z.device)
    kth = top.gather(1, last)
    if (p >= 1).all():
        return kth, torch.ones_like(kth[:, 0], dtype=torch.bool)
    heat_column = _to(heat[:, None], z.device)
    highest = top[:, :1].double()
    inside = torch.arange(width, device=z.device) <= last
    mass = torch.where(inside, ((top.double() - highest) / heat_column).exp(), 0.0)
    if filter_order == "joint" or width < k.max():
        total = ((z.double() - highest) / heat_column).exp().sum(-1, keepdim=True)
    else:
        ties_beyond = (z >= kth).sum(-1, keepdim=True) - last - 1
        total = mass.sum(-1, keepdim=True) + ties_beyond * mass.gather(1, last)
    # Rounded float64 mass may reach the total early: a row with p >= 1 must keep its whole top-k law.
    limit = total * _to(np.where(p < 1, p, np.inf)[:, None], z.device)
    before = mass.cumsum(-1) - mass
    kept = ((before < limit) & inside).sum(-1, keepdim=True)
    return top.gather(1, (kept - 1).clamp_min(0)), kept[:, 0] < width


def _largest(z: Float[Tensor, "r v"], width: int) -> Float[Tensor, "r width"]:
    """The largest values of each row in falling order, NaN first."""
    v = z.shape[1]
    if z.device.type == "cpu" and (width == v or v <= NARROW):
        # numpy sorts values alone, vectorised: 3 (large v) to 30 times as fast as torch, which carries indices.
        return torch.from_numpy(np.sort(z.numpy(), axis=-1)[:, : -width - 1 : -1].copy())
    if width == v:
        return z.sort(dim=-1, descending=True).values
    return z.topk(width, dim=-1, sorted=True).values


def invalid(probs: Float[Tensor, "n v"]) -> Bool[Tensor, " n"]:
    """Rows without a law (non-finite logits): `law` makes them NaN throughout, so one column tells."""
    return probs[:, 0].isnan()


def sample(probs: Float[Tensor, "n v"], uniforms: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Ids int64 [n] by inverting the float64 distribution function at `uniforms` (float64, in [0, 1)).

    Never returns a token of zero mass, whatever rounding or scan order does. Invalid rows get -1.
    """
    cdf = probs.cumsum(-1, dtype=torch.float64)
    if cdf.is_cuda:
        # A parallel scan is not monotone to the last bit: only steps of positive mass may rise.
        cdf = torch.where(probs > 0, cdf, 0.0).cummax(-1).values
    total = cdf[:, -1:]
    target = torch.minimum(uniforms.double()[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    # The first step that rises above the target; a step without mass does not rise.
    ids = torch.searchsorted(cdf, target, right=True)[:, 0]
    return torch.where(invalid(probs), -1, ids)


def residual(p: Float[Tensor, "n v"], q: Float[Tensor, "n v"]) -> Float[Tensor, "n v"]:
    """Law of the token drawn after a rejection: (p - q)+ normalised in float64, in the dtype of p.

    p: target law, q: proposal law. Where p <= q everywhere the residual has no mass; a rejection there has
    probability zero up to rounding, and p itself is the answer. NaN in either law makes the row NaN.
    """
    surplus = (p.double() - q.double()).clamp_min(0)
    total = surplus.sum(-1, keepdim=True)
    return torch.where(total == 0, p.double(), surplus / total).to(p.dtype)


def head(probs: Float[Tensor, "n v"], k: int) -> tuple[Int[Tensor, "n k"], Float[Tensor, "n k"]]:
    """The k likeliest tokens in falling order: ids int32 [n, k] and natural logs [n, k].

    A probability that underflowed to zero is reported at the smallest normal number, so that logs stay finite.
    """
    if not 1 <= k <= probs.shape[1]:
        raise ValueError(f"head size {k}; accepted: 1 to the vocabulary size {probs.shape[1]}; lower head_size")
    values, ids = _small_top(probs, k) or probs.topk(k, dim=-1, sorted=True)
    return ids.int(), values.clamp_min(torch.finfo(probs.dtype).tiny).log()


def _small_top(probs: Float[Tensor, "n v"], k: int) -> tuple[Tensor, Tensor] | None:
    """As `topk`, ties in order of ids, three times as fast for float32 rows of a small vocabulary on the CPU, where
    numpy's vectorised sort is. None where that does not apply."""
    n, v = probs.shape
    if probs.device.type != "cpu" or probs.dtype != torch.float32 or v > 4096 or not n:
        return None
    array = probs.numpy()
    flat = np.flatnonzero(array >= np.sort(array, axis=-1)[:, v - k, None])
    if len(flat) != n * k:  # a tie at the k-th place, or NaN
        return None
    # The bits of non-negative floats sort as integers; the id below them breaks ties.
    bits = array.ravel()[flat].view(np.int32).astype(np.int64)
    keys = np.sort((bits << 32 | (v - 1 - flat % v)).reshape(n, k), axis=-1)[:, ::-1]
    values = (keys >> 32).astype(np.int32).view(np.float32)
    return torch.from_numpy(values), torch.from_numpy(v - 1 - (keys & 0xFFFFFFFF))


def _divide(z: Tensor, heat: NDArray) -> Tensor:
    # Always a column, never a scalar: CUDA turns division by a scalar into a multiplication, and a row's bits must
    # not depend on whether its neighbours share its temperature. x / 1 is exact either way.
    return z if (heat == 1).all() else z / _to(heat[:, None], z.device).to(z.dtype)


def _rows(z: Tensor, rows: NDArray) -> Tensor:
    return z if len(rows) == z.shape[0] else z.index_select(0, _to(rows, z.device))


def _to(array: NDArray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(array)).to(device, non_blocking=True)  # a copy: broadcasts are read-only


def _host_rows(value: ArrayLike | Tensor, n: int, dtype: type, name: str) -> NDArray:
    array = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value).astype(dtype)
    if array.ndim > 1 or (array.ndim == 1 and len(array) != n):
        raise ValueError(f"{name} has shape {array.shape}; accepted: one number, or one for each of the {n} rows")
    return np.full(n, array) if array.ndim == 0 else array


def _refuse(values: NDArray, good: NDArray, name: str, accepted: str) -> None:
    if not good.all():
        row = int(np.argmin(good))
        raise ValueError(f"{name} {values[row]} in row {row}; accepted: {accepted}")
