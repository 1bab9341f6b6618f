"""Attention maps: every distance between a query and a key becomes one that the model was trained on.

m is the position of a query, n that of a key, D = m - n their distance, L the model's window, N the target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from ropepatch.attention.attention_map import (
    FITTED,
    TRAINED,
    AttentionMap,
    Divisor,
    Whole,
    constant,
    far_band,
    near_band,
)
from ropepatch.attention.bands import Band, Place, behind, same, start
from ropepatch.settings.parameters import WholeFromOne, find_kind, refuse_parameters


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
        return near_band(self.window), far_band(self.window, constant(self.window), start)


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
        return near_band(self.window), far_band(
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
        return near_band(self.window), far_band(
            self.window, lambda m: m // group + shift, lambda n: n // group
        )


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
    kept_for = 0
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
            Band(start, chunks_back(1), constant(min(2 * s - 1, c)), within),
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
        length = self.length
        step = -(-(self._read(self.tail) + 1) * max(1, length - 1) // self.mapped)  # where u grows next
        tail = min(step, length) - 1
        near = self.head - (self._read(self.head) + 1)
        return tail, near, length - 1 - tail - self._read(length - 1 - tail) - near

    def regions(self) -> tuple[Band, ...]:
        count, span = self.mapped, max(1, self.length - 1)
        tail, near, far = self._ends()
        middle, last = behind(self.head + 1), behind(max(self.length - tail, self.head + 1))

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
    control = True
    formula = "D below W; W for n < k; else unseen"
    paper = "arXiv:2308.16137"
    kept_for = 0
    sinks: WholeFromOne = 4

    def derived(self, window: int, target: int) -> dict[str, Any]:
        return {"window": max(1, 3 * window // 4)}

    def reach(self, window: int) -> int | None:
        return None

    def regions(self) -> tuple[Band, ...]:
        sinks, far = self.sinks, behind(self.window)
        first = Band(start, lambda m: far(m).clamp(max=sinks), constant(self.window), start)
        return near_band(self.window), first


@dataclass(frozen=True, kw_only=True)
class String(AttentionMap):
    """Far positions are shifted over the ones that were seldom trained (An et al. 2024, STRING).

    Args:
        shift: S, in tokens; distances below it stay as they are; N/3 by default, more where N needs it, at
            most L.
        window: W, the distance that a key S tokens away is read at; L/32 by default.
    """

    name = "string"
    formula = "D below S, then D − S + W"
    paper = "arXiv:2410.18745"
    kept_for = 0
    shift: Whole = FITTED
    window: Whole = FITTED

    def derived(self, window: int, target: int) -> dict[str, Any]:
        own = self.window or max(1, window // 32)
        return {"shift": max(1, min(max(target // 3, target - window + own), window)), "window": own}

    def check(self, window: int) -> None:
        self._require(self.shift <= window, "shift", f"at most {window}")
        self._require(self.window <= self.shift, "window", f"at most {self.shift}")

    def reach(self, window: int) -> int:
        return window + self.shift - self.window

    def regions(self) -> tuple[Band, ...]:
        nearer = self.window - self.shift
        return near_band(self.shift), far_band(self.shift, lambda m: m + nearer, same)


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
