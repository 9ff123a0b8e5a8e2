"""Row `reference`: recorded probabilities against float64 laws recomputed from the saved raw logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from experiments.evidence import Row, at_most, must_fail
from experiments.oracle import token_law
from experiments.validate.rows_of import Comparison, each
from experiments.validate.settings import Context, Setting

LIMIT, NEAR, MAX_NEAR = 2e-5, 1e-6, 1e-3


def rows(context: Context) -> list[Row]:
    found, shifted, hotter = [], Comparison(), Comparison()
    settings = context.settings_of(context.engines.vocab_size)
    for arm in context.engines.arms:
        total, near = Comparison(), 0
        for setting in settings:
            for support, tokens, _, logits in each(context.sample(arm, setting)):
                exact, margins = recompute(logits, setting)
                close = np.flatnonzero(margins <= NEAR)
                near += len(close)
                kept = np.setdiff1d(np.arange(len(tokens)), close)
                for row in kept:
                    total.add(support[int(row) : int(row) + 1], tokens[row : row + 1], exact[row : row + 1])
        about = f"{total.rows:,} rows of {len(settings)} settings; probability {total.probability:.2g}"
        found += [
            at_most(f"reference/{arm}_l1", total.l1, LIMIT, "", about),
            Row(f"reference/{arm}_support", total.support, "rows differ", "0", total.rows > 0 and total.support == 0),
            at_most(
                f"reference/{arm}_near", near / (total.rows + near), MAX_NEAR, "of rows", f"{near} near the cutoff"
            ),
        ]
        for setting in (settings[0], settings[-1]):
            support, tokens, _, logits = next(each(context.sample(arm, setting)))
            shifted.add(support[1:], tokens[:-1], recompute(logits, setting)[0][:-1])
            hotter.add(support, tokens, recompute(logits * np.float32(1.001), setting)[0])
    found += [
        must_fail(at_most("reference/control_shifted", shifted.l1, LIMIT), "rows one token late"),
        must_fail(at_most("reference/control_temperature", hotter.l1, LIMIT), "a temperature off by 0.1 %"),
    ]
    return found


def recompute(logits: NDArray[np.float32], setting: Setting) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Exact laws [n, V] and how near each row's cutoff lies to a tie of rounding."""
    spec = setting.spec(0)
    pairs = [token_law(row, spec.temperature, spec.top_k, spec.top_p, spec.filter_order) for row in logits]
    return np.stack([law for law, _ in pairs]), np.array([margin for _, margin in pairs])
