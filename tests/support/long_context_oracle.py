"""LongPPL (Fang et al. 2024, arXiv:2410.23771) in float64 NumPy, from the paper.

A token's losses are -ln p with all the context (full) and in a short window, in nats. Beside each formula
are plausible mistakes, which the tests must reject.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def long_perplexity(full: Array, short: Array, scored: Array | None = None) -> tuple[float, int]:
    """exp of the mean loss ``scored``, or full, over the key tokens of full and short; how many they are."""
    log_full, log_short = -full.astype(np.float64), -short.astype(np.float64)
    influential = (log_full - log_short > 2.0) & (log_full > -2.0)
    losses = (full if scored is None else scored).astype(np.float64)[influential]
    return float(np.exp(losses.mean())), int(influential.sum())


def _of(influential: Array, full: Array) -> tuple[float, int]:
    return float(np.exp(full[influential].mean())) if influential.any() else np.nan, int(influential.sum())


SABOTAGE: dict[str, Callable[[Array, Array], tuple[float, int]]] = {
    "the gain the wrong way round": lambda full, short: _of((full - short > 2) & (full < 2), full),
    "without a bound on the likelihood": lambda full, short: _of(short - full > 2, full),
    "the bound on the loss of the short window": lambda full, short: _of(
        (short - full > 2) & (short < 2), full
    ),
    "the loss of the short window": lambda full, short: _of((short - full > 2) & (full < 2), short),
    "the mean over all tokens": lambda full, short: (
        float(np.exp(np.where((short - full > 2) & (full < 2), full, 0).mean())),
        int(((short - full > 2) & (full < 2)).sum()),
    ),
}
