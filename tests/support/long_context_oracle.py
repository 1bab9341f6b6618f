"""LongPPL (Fang et al. 2024, arXiv:2410.23771) in float64 NumPy, from the paper.

A token's losses are -ln p with all the context (full) and in a short window, in nats.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def long_perplexity(full: Array, short: Array, scored: Array | None = None) -> tuple[float, int]:
    """exp of the mean loss ``scored``, or full, over the key tokens of full and short; how many they are."""
    log_full, log_short = -full.astype(np.float64), -short.astype(np.float64)
    influential = (log_full - log_short > 2.0) & (log_full > -2.0)
    losses = (full if scored is None else scored).astype(np.float64)[influential]
    return float(np.exp(losses.mean())), int(influential.sum())
