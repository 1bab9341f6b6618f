"""Position ids for training rows, so that a short window trains a long target.

Only the positions jump: the text of a window is always one piece. The papers also take the text behind a jump
from farther on; PoSE found that this hardly matters (section 3 of arXiv:2309.10400).

Shapes: W tokens of a window.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor

from ropepatch.data.texts import check
from ropepatch.errors import RopepatchError
from ropepatch.settings import check_keys, is_amount, is_count, refuse_unknown


@dataclass(frozen=True, kw_only=True)
class PositionSampling(ABC):
    """Where the tokens of a window are said to stand within the target."""

    name: ClassVar[str]
    paper: ClassVar[str]

    def sample(self, window: int, target: int, draw: random.Random) -> Tensor:
        """Strictly ascending positions [W] below ``target``, int64; 0 ... W-1 where W reaches the target."""
        if target <= window:
            return torch.arange(window)
        return self._sample(window, target, draw)

    @abstractmethod
    def _sample(self, window: int, target: int, draw: random.Random) -> Tensor:
        """The same for windows below the target, down to a single token."""

    def for_row(self, draw: random.Random) -> PositionSampling:
        """The sampling of all segments of one row."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data that `read_positions` takes."""
        return {"name": self.name} | asdict(self)


@dataclass(frozen=True, kw_only=True)
class TrueLength(PositionSampling):
    """Where they stand."""

    name = "true-length"
    paper = "arXiv:2306.15595"

    def _sample(self, window: int, target: int, draw: random.Random) -> Tensor:
        return torch.arange(window)


@dataclass(frozen=True, kw_only=True)
class PoSE(PositionSampling):
    """Some chunks with jumps between them; lengths and jumps are drawn anew for every window.

    The first chunk starts at 0. Chunk i has a length from 1 to what leaves one for each further chunk, and
    is shifted by a skip u_i ~ U{u_(i-1) ... target - W} (equation 3 and figure 6 of the paper).

    Args:
        chunks: How many, or as many as there are tokens. 2 in the paper, 3 did as well; 1 is `true-length`.

    Raises:
        RopepatchError: No whole number above 0.
    """

    name = "pose"
    paper = "arXiv:2309.10400"
    chunks: int = 2

    def __post_init__(self) -> None:
        check("chunks", self.chunks, is_count(self.chunks), "a whole number above 0")

    def _sample(self, window: int, target: int, draw: random.Random) -> Tensor:
        starts, skips = [0], [0]
        for chunks_left in range(min(self.chunks, window) - 1, 0, -1):
            starts.append(draw.randint(starts[-1] + 1, window - chunks_left))
            skips.append(draw.randint(skips[-1], target - window))
        lengths = torch.tensor([*starts, window]).diff()
        return torch.arange(window) + torch.tensor(skips).repeat_interleave(lengths)


@dataclass(frozen=True, kw_only=True)
class RandPos(PositionSampling):
    """Any positions, in order. It fails on LLaMA (table 5 of arXiv:2309.10400): here to compare with."""

    name = "randpos"
    paper = "arXiv:2305.16843"

    def _sample(self, window: int, target: int, draw: random.Random) -> Tensor:
        return torch.tensor(sorted(draw.sample(range(target), window)))


@dataclass(frozen=True, kw_only=True)
class CREAM(PositionSampling):
    """A head at the start of the target, a tail at its end and a chunk drawn from between.

    With f = target / W, head and tail have h tokens each, W / 3 or, every other time, 4 f (at most W / 3).
    The chunk ends at e ~ U{h + (M-1) α ... α W - h - 1}, M its length, with α = ⌊x⌋ / 2, x ~ N(1 + f, 3) cut
    off at 2 and 2 f, as the released code does; there f is whole. At the upper cut α is f, whole or not, so
    that no position of the target is left out.
    """

    name = "cream"
    paper = "arXiv:2406.07138"

    def _sample(self, window: int, target: int, draw: random.Random) -> Tensor:
        factor = Fraction(target, window)
        ends = window // 3
        if draw.random() < 0.5:
            ends = min(ends, math.floor(4 * factor))
        middle = window - 2 * ends
        x = draw.gauss(1 + float(factor), 3)
        alpha = factor if x >= 2 * factor else Fraction(max(2, math.floor(x)), 2)
        earliest = ends + math.floor((middle - 1) * alpha)
        last = draw.randint(earliest, math.floor(alpha * window) - ends - 1)
        return torch.cat(
            [
                torch.arange(ends),
                torch.arange(last + 1 - middle, last + 1),
                torch.arange(target - ends, target),
            ]
        )


@dataclass(frozen=True, kw_only=True)
class Part:
    """One of the samplings of a mixture.

    Args:
        sampling: Any but a mixture.
        weight: Its share of the rows, relative to the other parts.

    Raises:
        RopepatchError: One of these is not what it must be.
    """

    sampling: PositionSampling
    weight: float = 1.0

    def __post_init__(self) -> None:
        single = isinstance(self.sampling, PositionSampling) and not isinstance(self.sampling, Mixture)
        check("a part of a mixture", self.sampling, single, "a position sampling that is no mixture")
        check("weight", self.weight, is_amount(self.weight), "a number above 0")


@dataclass(frozen=True, kw_only=True)
class Mixture(PositionSampling):
    """Each row draws one of several samplings: with some `true-length` rows, short contexts stay in practice.

    Args:
        parts: At least one.

    Raises:
        RopepatchError: These are no parts.
    """

    name = "mixture"
    paper = ""
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        fits = isinstance(self.parts, tuple) and self.parts and all(isinstance(p, Part) for p in self.parts)
        check("parts", self.parts, fits, "a list of at least one part")

    def _sample(self, window: int, target: int, draw: random.Random) -> Tensor:
        return self.for_row(draw).sample(window, target, draw)

    def for_row(self, draw: random.Random) -> PositionSampling:
        """The part that is drawn."""
        (part,) = draw.choices(self.parts, [part.weight for part in self.parts])
        return part.sampling

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data that `read_positions` takes."""
        parts = [part.sampling.to_dict() | {"weight": part.weight} for part in self.parts]
        return {"name": self.name, "parts": parts}


POSITIONS: dict[str, type[PositionSampling]] = {
    kind.name: kind for kind in (TrueLength, PoSE, RandPos, CREAM, Mixture)
}


def row_positions(
    sampling: PositionSampling, lengths: Sequence[int], target: int, draw: random.Random
) -> Tensor:
    """Positions [W] of a row of segments of these ``lengths``, int64, each sampled for itself."""
    chosen = sampling.for_row(draw)
    return torch.cat([chosen.sample(length, target, draw) for length in lengths])


def read_positions(content: Any) -> PositionSampling:
    """From a recipe: a name, or a mapping with a name and its parameters.

    Raises:
        RopepatchError: No such sampling, or a parameter that is unknown, missing or not what it must be.
    """
    parameters = dict(content) if isinstance(content, dict) else {"name": content}
    name = parameters.pop("name", None)
    refuse_unknown([name], POSITIONS, "position sampling")
    kind: Any = POSITIONS[name]
    check_keys(kind, parameters)
    if kind is Mixture:
        check("parts", parameters["parts"], isinstance(parameters["parts"], list), "a list")
        parameters = {"parts": tuple(map(_read_part, parameters["parts"]))}
    sampling: PositionSampling = kind(**parameters)
    return sampling


def _read_part(content: Any) -> Part:
    if not isinstance(content, dict):
        return Part(sampling=read_positions(content))
    if content.get("name") == Mixture.name:
        raise RopepatchError("a mixture cannot be a part of a mixture", hint="list its parts instead")
    weight = content.get("weight", 1.0)
    return Part(
        sampling=read_positions({key: value for key, value in content.items() if key != "weight"}),
        weight=weight,
    )
