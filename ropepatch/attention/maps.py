"""Attention maps: every distance between a query and a key becomes one that the model was trained on.

m is the position of a query, n that of a key, D = m - n their distance, L the model's window, N the target.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from ropepatch.attention.bands import Band, Place, behind, same, start
from ropepatch.errors import RopepatchError
from ropepatch.settings.parameters import (
    AboveOne,
    Checked,
    Positive,
    WholeFromOne,
    find_kind,
    refuse_parameters,
)

if TYPE_CHECKING:
    Whole = int
    Divisor = float
else:
    Whole = WholeFromOne | None
    Divisor = AboveOne | None

FITTED: Any = None  # a parameter that follows from L and N
TRAINED = 0.6  # rho, the share of L whose distances a model knows well


@dataclass(frozen=True, kw_only=True)
class AttentionMap(Checked, ABC):
    """One published way to keep every distance within those that were trained.

    Parameters that are None follow from L and N; `fitted` fills them in.

    Args:
        log_n: Whether the scores of a query at m are multiplied by ln(m + 1) / ln L where that is above 1.
        attention_factor: What cos and sin are multiplied by. The authors' code has 0.05 ln(N/L) + 1 for dca,
            0.1 ln 2 + 1 for lampe and string; the text within the window is then read otherwise, too.

    Raises:
        RopepatchError: On parameters outside the map's domain.
    """

    listed_by = "ropepatch methods"
    formula: ClassVar[str]  # one line, for tables
    paper: ClassVar[str]
    log_n: bool = False
    attention_factor: Positive = 1.0

    def fitted(self, window: int, target: int) -> Self:
        """The map with all its parameters, for a model of L = `window` tokens that is to read `target`.

        Raises:
            RopepatchError: If its distances would leave the window, or there is no such map of this window.
        """
        derived = self.derived(window, max(window, target))
        mine = {name: value for name, value in derived.items() if getattr(self, name) is None}
        whole = replace(self, **mine)
        whole.check(window)
        reach = whole.reach(window)
        if reach is not None and reach < target:
            raise RopepatchError(
                f"{self.name} with {whole.described()} keeps distances within {window} up to "
                f"{reach:,} tokens, not {target:,}",
                hint=f"ask for {reach:,} tokens at most, or use rerope" if reach > window else "use rerope",
            )
        return whole

    @abstractmethod
    def derived(self, window: int, target: int) -> dict[str, Any]:
        """The parameters for L and N, by name."""

    @abstractmethod
    def check(self, window: int) -> None:
        """Refuse parameters that make no map of a window.

        Raises:
            RopepatchError: With the parameter.
        """

    @abstractmethod
    def reach(self, window: int) -> int | None:
        """The most tokens whose effective distances all stay below L; None where there is no end."""

    @abstractmethod
    def regions(self) -> tuple[Band, ...]:
        """The bands, the nearest keys first. All parameters are there."""

    def bands(self) -> tuple[Band, ...]:
        """The bands; for equal maps the same objects, by which layouts are cached."""
        return _regions(self)

    def temperature(self, queries: Tensor, window: int) -> Tensor | None:
        """What the scores of queries are multiplied by, float64; None for 1."""
        factor = self.attention_factor**2
        if not self.log_n:
            return None if factor == 1 else torch.full_like(queries, factor, dtype=torch.float64)
        return ((queries.double() + 1).clamp(min=1).log() / math.log(window)).clamp(min=1) * factor

    def parameters(self) -> dict[str, Any]:
        """The parameters by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def described(self) -> str:
        """The parameters, for a line."""
        given = {name: value for name, value in self.parameters().items() if value not in (None, False, 1.0)}
        return ", ".join(
            f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in given.items()
        )


@lru_cache(maxsize=64)
def _regions(one: AttentionMap) -> tuple[Band, ...]:
    return one.regions()


def _constant(place: int) -> Place:
    return lambda positions: torch.full_like(positions, place)


def _near(window: int) -> Band:
    """Distances below a window, as they are."""
    return Band(behind(window), behind(0), same, same)


def _far(window: int, query: Place, key: Place) -> Band:
    """Distances from a window on."""
    return Band(start, behind(window), query, key)


@dataclass(frozen=True, kw_only=True)
class _Windowed(AttentionMap):
    """Distances below a window stay as they are.

    Args:
        window: W, in tokens.
    """

    window: Whole = FITTED

    def check(self, window: int) -> None:
        self._require(self.window < window, "window", f"below {window}")


@dataclass(frozen=True, kw_only=True)
class ReRoPE(_Windowed):
    """No distance is above the window (Su 2023).

    Args:
        window: W, in tokens; L/2 by default.
    """

    name = "rerope"
    formula = "min(D, W)"
    paper = "github.com/bojone/rerope"

    def derived(self, window: int, target: int) -> dict[str, Any]:
        return {"window": max(1, window // 2)}

    def reach(self, window: int) -> int | None:
        return None

    def regions(self) -> tuple[Band, ...]:
        return _near(self.window), _far(self.window, _constant(self.window), start)


@dataclass(frozen=True, kw_only=True)
class LeakyReRoPE(_Windowed):
    """From the window on distances grow 1/k as fast (Su 2023).

    Args:
        window: W, in tokens; L/2 by default.
        divisor: k; by default N is read as 0.6 L.
    """

    name = "leaky-rerope"
    formula = "D below W, then W + (D−W)/k"
    paper = "github.com/bojone/rerope"
    divisor: Divisor = FITTED

    def derived(self, window: int, target: int) -> dict[str, Any]:
        own = self.window or max(1, window // 2)
        room = TRAINED * window - own
        return {
            "window": own,
            "divisor": max(1.0 + 1e-6, (target - own) / (room if room > 0 else window - own)),
        }

    def reach(self, window: int) -> int | None:
        return math.floor(self.window + self.divisor * (window - self.window) + 1e-9)

    def regions(self) -> tuple[Band, ...]:
        k, shift = self.divisor, self.window - self.window / self.divisor
        return _near(self.window), _far(
            self.window, lambda m: shift + m.double() / k, lambda n: n.double() / k
        )


@dataclass(frozen=True, kw_only=True)
class SelfExtend(_Windowed):
    """From the window on positions count in groups (Jin et al. 2024).

    Whole numbers, as in the paper; the authors' code shifts by the fraction W - W/G.

    Args:
        window: W, in tokens; L/4 by default.
        group: G, in tokens; by default N is read as 0.6 L.
    """

    name = "self-extend"
    formula = "D below W, then ⌊m/G⌋ − ⌊n/G⌋ + W − ⌊W/G⌋"
    paper = "arXiv:2401.01325"
    group: Whole = FITTED

    def derived(self, window: int, target: int) -> dict[str, Any]:
        own = self.window or max(1, window // 4)
        if own >= window:
            return {"window": own, "group": 1}
        room = TRAINED * window - own
        group = math.ceil((target - own) / (room if room > 0 else window - own))
        while replace(self, window=own, group=group).reach(window) < target:
            group += 1
        return {"window": own, "group": group}

    def reach(self, window: int) -> int:
        return (window - self.window + self.window // self.group) * self.group

    def regions(self) -> tuple[Band, ...]:
        group, shift = self.group, self.window - self.window // self.group
        return _near(self.window), _far(self.window, lambda m: m // group + shift, lambda n: n // group)


@dataclass(frozen=True, kw_only=True)
class DualChunk(AttentionMap):
    """Keys count within their chunk, queries from the end of the chunk before theirs (An et al. 2024).

    Args:
        clip: c, the greatest distance, in tokens; 3L/4 by default.
        chunk: s, in tokens; 5L/8 by default.
    """

    name = "dca"
    formula = "m mod s, min(m mod s + s, c) or min(2s−1, c), less n mod s"
    paper = "arXiv:2402.17463"
    clip: Whole = FITTED
    chunk: Whole = FITTED

    def derived(self, window: int, target: int) -> dict[str, Any]:
        return {"clip": max(1, 3 * window // 4), "chunk": max(1, 5 * window // 8)}

    def check(self, window: int) -> None:
        self._require(self.clip < window, "clip", f"below {window}")
        self._require(self.chunk <= self.clip, "chunk", f"at most {self.clip}")

    def reach(self, window: int) -> int | None:
        return None

    def regions(self) -> tuple[Band, ...]:
        c, s = self.clip, self.chunk

        def chunks_back(count: int) -> Place:
            return lambda m: (m // s - count) * s

        def within(positions: Tensor) -> Tensor:
            return positions % s

        return (
            Band(chunks_back(0), behind(0), within, within),
            Band(chunks_back(1), chunks_back(0), lambda m: (m % s + s).clamp(max=c), within),
            Band(start, chunks_back(1), _constant(min(2 * s - 1, c)), within),
        )


@dataclass(frozen=True, kw_only=True)
class LaMPE(AttentionMap):
    """Positions between a near and a far end are read as M of them; made for one N (Zhang et al. 2025).

    Args:
        length: N, in tokens.
        mapped: M; 0.6 L by default.
        head: h, the greatest distance that stays as it is; L/8 by default.
        tail: t, how many of the farthest distances keep their steps, at least; L/20 by default.
    """

    name = "lampe"
    formula = "D up to h, then ⌊Mm/(N−1)⌋ − ⌊Mn/(N−1)⌋ + b₁, D − b₂ at the far end"
    paper = "arXiv:2508.02308"
    length: Whole = FITTED
    mapped: Whole = FITTED
    head: Whole = FITTED
    tail: Whole = FITTED

    def derived(self, window: int, target: int) -> dict[str, Any]:
        return {
            "length": target,
            "mapped": max(1, int(TRAINED * window)),
            "head": max(1, window // 8),
            "tail": max(1, window // 20),
        }

    def check(self, window: int) -> None:
        self._require(self.mapped < window, "mapped", f"below {window}")
        self._require(2 * self.head <= self.length, "head", f"at most {self.length // 2}")
        self._require(self.head + self.tail < self.length, "tail", f"below {self.length - self.head}")

    def reach(self, window: int) -> int | None:
        """N, or 0 where its parameters leave the window."""
        _, near, far = self._ends()
        longest = max(self.length - 1 - far, self._read(self.length - 1) + near)
        return self.length if longest < window else 0

    def _read(self, position: int) -> int:
        return self.mapped * position // max(1, self.length - 1)

    def _ends(self) -> tuple[int, int, int]:
        """R, b1 and b2."""
        tail, length = self.tail, self.length
        while tail + 1 < length and self._read(tail) == self._read(tail + 1):
            tail += 1
        near = self.head - (self._read(self.head) + 1)
        return tail, near, length - 1 - tail - self._read(length - 1 - tail) - near

    def regions(self) -> tuple[Band, ...]:
        count, span = self.mapped, max(1, self.length - 1)
        tail, near, far = self._ends()
        middle, last = behind(self.head + 1), behind(self.length - tail)

        def read(positions: Tensor) -> Tensor:
            return count * positions // span

        return (
            Band(middle, behind(0), same, same),
            Band(last, middle, lambda m: read(m) + near, read),
            Band(start, last, lambda m: m - far, same),
        )


@dataclass(frozen=True, kw_only=True)
class Lambda(_Windowed):
    """Only the window and the first tokens are seen; what any other map gains on it, far context brought.

    Args:
        window: W, in tokens; 3L/4 by default.
        sinks: k, the first tokens, which are seen from everywhere.
    """

    name = "lambda"
    formula = "D below W; W for n < k; else unseen"
    paper = "arXiv:2308.16137"
    sinks: WholeFromOne = 4

    def derived(self, window: int, target: int) -> dict[str, Any]:
        return {"window": max(1, 3 * window // 4)}

    def reach(self, window: int) -> int | None:
        return None

    def regions(self) -> tuple[Band, ...]:
        sinks, far = self.sinks, behind(self.window)
        near, first = _near(self.window), _constant(self.window)
        return near, Band(start, lambda m: far(m).clamp(max=sinks), first, start)


@dataclass(frozen=True, kw_only=True)
class String(AttentionMap):
    """Far positions are shifted over the ones that were seldom trained (An et al. 2024, STRING).

    Args:
        shift: S, in tokens; distances below it stay as they are; N/3 by default, at most L.
        window: W, the distance that a key S tokens away is read at; L/32 by default.
    """

    name = "string"
    formula = "D below S, then D − S + W"
    paper = "arXiv:2410.18745"
    shift: Whole = FITTED
    window: Whole = FITTED

    def derived(self, window: int, target: int) -> dict[str, Any]:
        return {"shift": max(1, min(target // 3, window)), "window": max(1, window // 32)}

    def check(self, window: int) -> None:
        self._require(self.shift <= window, "shift", f"at most {window}")
        self._require(self.window <= self.shift, "window", f"at most {self.shift}")

    def reach(self, window: int) -> int:
        return window + self.shift - self.window

    def regions(self) -> tuple[Band, ...]:
        nearer = self.window - self.shift
        return _near(self.shift), _far(self.shift, lambda m: m + nearer, same)


MAPS: dict[str, type[AttentionMap]] = {
    kind.name: kind for kind in (ReRoPE, LeakyReRoPE, SelfExtend, DualChunk, LaMPE, Lambda, String)
}
OTHER_NAMES = {"selfextend": "self-extend", "chunkllama": "dca", "dual-chunk": "dca", "lm-infinite": "lambda"}


def make_map(name: str, /, **parameters: Any) -> AttentionMap:
    """The map of that name with these parameters; those that are left out follow from L and N.

    Raises:
        RopepatchError: On an unknown map or parameter, or one outside its domain.
    """
    kind = find_kind(name, MAPS, "map", OTHER_NAMES)
    refuse_parameters(name, [field.name for field in fields(kind)], parameters)
    return kind(**parameters)
