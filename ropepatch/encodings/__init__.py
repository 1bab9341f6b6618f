"""Every position encoding of the literature, as a swap-in for the rope of a loaded model."""

from __future__ import annotations

from ropepatch.encodings.encoding import Encoding
from ropepatch.encodings.registry import ENCODINGS, make_encoding
from ropepatch.encodings.swapping import Swap, swap, swapped

__all__ = ["ENCODINGS", "Encoding", "Swap", "make_encoding", "swap", "swapped"]
