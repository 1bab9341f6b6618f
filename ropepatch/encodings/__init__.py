"""Published position encodings, each of which can replace the RoPE of a loaded model."""

from __future__ import annotations

from typing import Any

from ropepatch.encodings import absolute, relative, rotary
from ropepatch.encodings.encoding import Encoding
from ropepatch.settings import Registry

__all__ = ["ENCODINGS", "Encoding", "make_encoding"]

ENCODINGS: Registry[Encoding] = Registry(
    "encoding",
    (
        absolute.Integer,
        absolute.Normalised,
        absolute.Binary,
        absolute.Sinusoidal,
        absolute.LearnedPositions,
        relative.Shaw,
        relative.TransformerXL,
        relative.NEZHA,
        relative.T5Bias,
        relative.ALiBi,
        rotary.RoPE,
        rotary.XPos,
        rotary.ProportionalRotary,
        rotary.PartialRotary,
        rotary.Axial,
        rotary.NoPE,
        rotary.NoPEHeads,
        rotary.NoPELayers,
        rotary.DroPE,
    ),
)


def make_encoding(name: str, /, **parameters: Any) -> Encoding:
    """Make an encoding.

    Raises:
        RopepatchError: On an unknown encoding or parameter, or a missing or invalid parameter.
    """
    return ENCODINGS.make(name, **parameters)
