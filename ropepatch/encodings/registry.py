"""The registry of encodings, by the name the user types. A third party adds an entry to ENCODINGS."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ropepatch.encodings.absolute import Binary, Integer, LearnedPositions, Normalised, Sinusoidal
from ropepatch.encodings.encoding import Encoding
from ropepatch.encodings.relative import NEZHA, ALiBi, Shaw, T5Bias, TransformerXL
from ropepatch.encodings.rotary import (
    Axial,
    DroPE,
    NoPE,
    NoPEHeads,
    NoPELayers,
    PartialRotary,
    ProportionalRotary,
    RoPE,
    XPos,
)
from ropepatch.errors import RopepatchError
from ropepatch.settings.parameters import find_kind, hashable, refuse_parameters, required

ENCODINGS: dict[str, type[Encoding]] = {
    kind.name: kind
    for kind in (
        *(Integer, Normalised, Binary, Sinusoidal, LearnedPositions),
        *(Shaw, TransformerXL, NEZHA, T5Bias, ALiBi),
        *(RoPE, XPos, ProportionalRotary, PartialRotary, Axial),
        *(NoPE, NoPEHeads, NoPELayers, DroPE),
    )
}

OTHER_NAMES = {
    "sin": "sinusoidal",
    "absolute": "learned",
    "rotary": "rope",
    "txl": "transformer-xl",
    "transformerxl": "transformer-xl",
    "t5-bias": "t5",
    "relative": "shaw",
    "none": "nope",
    "normalized": "normalised",
    "rnope": "nope-layers",
}


def find_encoding(name: str) -> type[Encoding]:
    """The encoding of that name.

    Raises:
        RopepatchError: If there is none; with the nearest name and the list.
    """
    return find_kind(name, ENCODINGS, "encoding", OTHER_NAMES)


def make_encoding(name: str, /, **parameters: Any) -> Encoding:
    """The encoding of that name with these parameters.

    Raises:
        RopepatchError: On an unknown encoding or parameter, or one that is missing or outside its domain.
    """
    kind = find_encoding(name)
    refuse_parameters(name, [field.name for field in fields(kind)], parameters)
    if missing := [parameter for parameter in required(kind) if parameter not in parameters]:
        raise RopepatchError(
            f"{name} needs {', '.join(missing)}", hint=f"make_encoding({name!r}, {missing[0]}=...)"
        )
    return kind(**{parameter: hashable(value) for parameter, value in parameters.items()})
