"""Randomness that survives re-issue and resume: a draw is a function of (request seed, position, purpose)."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray


class Purpose(IntEnum):
    """What a uniform is used for; two purposes never share a number."""

    TOKEN = 0  # a token drawn from the target's law: regular sampling, target-only verification, bonus after acceptance
    PROPOSE = 1  # a draft proposal
    ACCEPT = 2  # the accept test of chain rejection
    RESIDUAL = 3  # the bonus after a rejection


def request_seed(run: str, step: int, prompt: int, sample: int) -> int:
    """63-bit seed of one request, independent of where and when it runs."""
    return xxhash.xxh3_64_intdigest(f"{run}\0{step}\0{prompt}\0{sample}".encode()) >> 1


def uniforms(seeds: ArrayLike, positions: ArrayLike, purpose: Purpose) -> NDArray[np.float64]:
    """Uniform float64 in [0, 1) with 52 random bits, elementwise over the broadcast of seeds and positions.

    Counter-based: the SplitMix64 finaliser (Steele, Lea and Flood 2014) over the key, then over key + counter.
    """
    purpose_key = np.array([int(purpose) + 1], np.uint64) * _GOLDEN
    key = _mix(np.asarray(seeds, dtype=np.uint64) + purpose_key)
    bits = _mix(key + np.asarray(positions, dtype=np.uint64) * _GOLDEN)
    return (_mix(bits ^ key) >> np.uint64(12)).astype(np.float64) * 2.0**-52


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = np.atleast_1d(x)  # array arithmetic wraps silently, scalar arithmetic warns
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
