"""Position remappings: map every distance between query and key to one that the model was trained on.

m is the position of a query, n that of a key, Δ = m - n their distance, L the original context length, N the
target length. `modeling_position_remapping` computes each under the same name and parameters.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from ropepatch.errors import RopepatchError
from ropepatch.scaling import METHODS
from ropepatch.scaling.rope import Method
from ropepatch.settings import AboveOne, Amount, Count, Registry, refuse_unknown

if TYPE_CHECKING:
    from ropepatch.attention.modeling_position_remapping import Band

FITTED: Any = None  # a parameter computed from L and N
TRAINED = 0.6  # rho, the share of L whose distances are well trained


class Remapping(Method):
    """One published way to keep every distance within the trained range.

    `fitted` computes parameters that are None from L and N.

    Args:
        log_n: Multiply the scores of a query at m by ln(m + 1) / ln L if that is above 1.
        attention_factor: The factor of cos and sin. The authors' code uses 0.05 ln(N/L) + 1 for dca and
            0.1 ln 2 + 1 for lampe and string, which also changes the logits of short texts.
    """

    kind = "position remapping"
    control: ClassVar[bool] = False  # measured as a control, never chosen
    saved_as = "its own code"
    needs: ClassVar[str]  # of all parameters together
    log_n: bool = False
    attention_factor: Amount = 1.0

    def fitted(self, window: int, target: int) -> Self:
        """Return the remapping with all its parameters, for L = `window` tokens and N = `target`.

        Raises:
            RopepatchError: If its distances would exceed L, or its parameters do not fit L.
        """
        derived = self.derived(window, max(window, target))
        whole = type(self)(**derived | self.model_dump(exclude_none=True))
        if not whole.fits(window):
            raise RopepatchError(
                f"{self.name} needs {self.needs}, got {whole.described()} for L = {window}",
                hint=self._list(),
            )
        reach = whole.reach(window)
        if reach is not None and reach < target:
            raise RopepatchError(
                f"{self.name} with {whole.described()} keeps distances within {window} up to "
                f"{reach:,} tokens, not {target:,}",
                hint="use rerope, which has no limit, or ask for fewer tokens",
            )
        return whole

    @abstractmethod
    def derived(self, window: int, target: int) -> dict[str, Any]:
        """Return the parameters for L and N, by name."""

    @abstractmethod
    def fits(self, window: int) -> bool:
        """Return whether the parameters fit an original context length, as `needs` says."""

    def reach(self, window: int) -> int | None:
        """Return the largest length whose remapped distances all stay below L; None if unlimited."""
        return None

    def bands(self) -> tuple[Band, ...]:
        """Return the bands, nearest keys first; all parameters must be set."""
        # Imports transformers: seconds
        from ropepatch.attention import modeling_position_remapping as modeling

        parameters = self.model_dump(exclude={"log_n", "attention_factor"})
        return modeling.REMAPPINGS[self.name](**parameters)

    def read_at(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the remapped distances [Q, T] of queries and keys: float64, NaN if masked."""
        table = torch.tensor(torch.nan, dtype=torch.float64, device=keys.device)
        for band in self.bands():
            apart = band.query(queries)[:, None] - band.key(keys)
            table = torch.where(band.holds(queries, keys), apart.double(), table)
        return table

    def described(self) -> str:
        """Return the parameters on one line."""
        given = self.model_dump(exclude_defaults=True)
        return ", ".join(
            f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in given.items()
        )


class _Windowed(Remapping):
    """A remapping that does not change distances below W."""

    needs = "window < L"
    window: Count = FITTED

    def fits(self, window: int) -> bool:
        return self.window < window

    def _squeeze(self, own: int, window: int, target: int) -> float:
        """Return by how much to divide the distances beyond W, so that N maps to 0.6 L if W is below that."""
        room = TRAINED * window - own
        return (target - own) / (room if room > 0 else window - own)


class ReRoPE(_Windowed):
    """Clip distances at W (Su 2023).

    Args:
        window: W, in tokens; L/2 by default.
    """

    name = "rerope"
    formula = "min(Δ, W)"
    paper = "github.com/bojone/rerope"

    def derived(self, window: int, target: int) -> dict[str, Any]:
        return {"window": max(1, window // 2)}


class LeakyReRoPE(_Windowed):
    """Divide the part of a distance beyond W by k (Su 2023).

    Args:
        window: W, in tokens; L/2 by default.
        divisor: k; by default N maps to 0.6 L.
    """

    name = "leaky-rerope"
    formula = "Δ below W, then W + (Δ−W)/k"
    paper = "github.com/bojone/rerope"
    divisor: AboveOne = FITTED

    def derived(self, window: int, target: int) -> dict[str, Any]:
        own = self.window or max(1, window // 2)
        divisor = max(1.0 + 1e-6, self._squeeze(own, window, target))
        return {"window": own, "divisor": divisor}

    def reach(self, window: int) -> int | None:
        return math.floor(self.window + self.divisor * (window - self.window) + 1e-9)


class SelfExtend(_Windowed):
    """Count positions in groups of G tokens for distances from W on (Jin et al. 2024).

    The shift is a whole number, as in the paper; the authors' code shifts by the fraction W - W/G.

    Args:
        window: W, in tokens; L/4 by default.
        group: G, in tokens; by default N maps to 0.6 L.
    """

    name = "self-extend"
    formula = "Δ below W, then ⌊m/G⌋ − ⌊n/G⌋ + W − ⌊W/G⌋"
    paper = "arXiv:2401.01325"
    group: Count = FITTED

    def derived(self, window: int, target: int) -> dict[str, Any]:
        own = self.window or max(1, window // 4)
        if own >= window:
            return {"window": own, "group": 1}
        group = math.ceil(self._squeeze(own, window, target))
        while _grouped_reach(own, group, window) < target:
            group += 1
        return {"window": own, "group": group}

    def reach(self, window: int) -> int:
        return _grouped_reach(self.window, self.group, window)


def _grouped_reach(own: int, group: int, window: int) -> int:
    return (window - own + own // group) * group


class DualChunk(Remapping):
    """Count keys within their chunk, and queries from the end of the previous chunk (An et al. 2024).

    Args:
        clip: c, the largest distance, in tokens; 3L/4 by default.
        chunk: s, in tokens; 5L/8 by default.
    """

    name = "dca"
    formula = "m mod s, min(m mod s + s, c) or min(2s−1, c), less n mod s"
    paper = "arXiv:2402.17463"
    needs = "chunk <= clip < L"
    clip: Count = FITTED
    chunk: Count = FITTED

    def derived(self, window: int, target: int) -> dict[str, Any]:
        return {"clip": max(1, 3 * window // 4), "chunk": max(1, 5 * window // 8)}

    def fits(self, window: int) -> bool:
        return self.chunk <= self.clip < window


class LaMPE(Remapping):
    """Compress the N positions between a near and a far end to M; fixed for one N (Zhang et al. 2025).

    Args:
        length: N, in tokens.
        mapped: M; 0.6 L by default.
        head: h, the largest unchanged distance; L/8 by default.
        tail: t, the least number of farthest distances that are not compressed; L/20 by default.
    """

    name = "lampe"
    formula = "Δ up to h, then ⌊Mm/(N−1)⌋ − ⌊Mn/(N−1)⌋ + b₁, Δ − b₂ at the far end"
    paper = "arXiv:2508.02308"
    needs = "mapped < L, 2 head <= length and head + tail < length"
    length: Count = FITTED
    mapped: Count = FITTED
    head: Count = FITTED
    tail: Count = FITTED

    def derived(self, window: int, target: int) -> dict[str, Any]:
        return {
            "length": target,
            "mapped": max(1, int(TRAINED * window)),
            "head": max(1, window // 8),
            "tail": max(1, window // 20),
        }

    def fits(self, window: int) -> bool:
        ends = max(2 * self.head, self.head + self.tail + 1)
        return self.mapped < window and ends <= self.length

    def reach(self, window: int) -> int | None:
        """Return N, or 0 if remapped distances would exceed L."""
        from ropepatch.attention.modeling_position_remapping import lampe_ends

        _, closer, farther = lampe_ends(self.length, self.mapped, self.head, self.tail)
        longest = max(self.length - 1 - farther, self.mapped + closer)
        return self.length if longest < window else 0


class Lambda(_Windowed):
    """Attend only to the last W and the first k tokens, as a control without distant context.

    Args:
        window: W, in tokens; 3L/4 by default.
        sinks: k, the number of first tokens, which every query attends to.
    """

    name = "lambda"
    control = True
    formula = "Δ below W; W for n < k; else unseen"
    paper = "arXiv:2308.16137"
    sinks: Count = 4

    def derived(self, window: int, target: int) -> dict[str, Any]:
        return {"window": max(1, 3 * window // 4)}


class String(Remapping):
    """Shift large distances to smaller ones, which are trained more often (An et al. 2024, STRING).

    Args:
        shift: S, in tokens; smaller distances do not change; N/3 by default, more if needed, at most L.
        window: W, the remapped distance of a key S tokens away; L/32 by default.
    """

    name = "string"
    formula = "Δ below S, then Δ − S + W"
    paper = "arXiv:2410.18745"
    needs = "window <= shift <= L"
    shift: Count = FITTED
    window: Count = FITTED

    def derived(self, window: int, target: int) -> dict[str, Any]:
        own = self.window or max(1, window // 32)
        return {
            "shift": max(1, min(max(target // 3, target - window + own), window)),
            "window": own,
        }

    def fits(self, window: int) -> bool:
        return self.window <= self.shift <= window

    def reach(self, window: int) -> int:
        return window + self.shift - self.window


REMAPPINGS: Registry[Remapping] = Registry(
    "remapping",
    (ReRoPE, LeakyReRoPE, SelfExtend, DualChunk, LaMPE, Lambda, String),
)


def find_method(name: str) -> type[Method]:
    """Return the scaling or position remapping of a name; an error suggests the nearest name."""
    kinds: dict[str, type[Method]] = {**METHODS, **REMAPPINGS}
    refuse_unknown(
        [name], kinds, "method", METHODS.other_names | REMAPPINGS.other_names
    )
    return kinds[name]


def teaching_window(window: int) -> int:
    """Return W = 3/4 L, the ReRoPE window of a teacher with L = `window`."""
    return max(1, 3 * window // 4)


def make_remapping(name: str, /, **parameters: Any) -> Remapping:
    """Return a remapping; omitted parameters are computed from L and N."""
    return REMAPPINGS.make(name, **parameters)
