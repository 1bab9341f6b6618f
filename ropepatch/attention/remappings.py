"""Position remappings: every distance between a query and a key becomes one that the model was trained on.

m is the position of a query, n that of a key, D = m - n their distance, L the model's window, N the target.
How each is computed stands in `modeling_position_remapping`, under the same name and parameters.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from ropepatch.errors import RopepatchError
from ropepatch.scaling.method import Method
from ropepatch.settings import AboveOne, Amount, Count, Registry

if TYPE_CHECKING:
    from ropepatch.attention.modeling_position_remapping import Band

    Whole = int
    Divisor = float
else:
    Whole = Count | None
    Divisor = AboveOne | None

FITTED: Any = None  # a parameter that follows from L and N
TRAINED = 0.6  # rho, the share of L whose distances a model knows well
MODIFIERS = "log_n", "attention_factor"  # parameters of every remapping, which change no distance


class Remapping(Method):
    """One published way to keep every distance within those that were trained.

    Parameters that are None follow from L and N; `fitted` fills them in.

    Args:
        log_n: Whether the scores of a query at m are multiplied by ln(m + 1) / ln L where that is above 1.
        attention_factor: What cos and sin are multiplied by. The authors' code has 0.05 ln(N/L) + 1 for dca,
            0.1 ln 2 + 1 for lampe and string; text within the window then has other logits, too.
    """

    kind = "position remapping"
    control: ClassVar[bool] = False  # to be measured beside others, and never chosen
    saved_as = "its own code"
    log_n: bool = False
    attention_factor: Amount = 1.0

    def fitted(self, window: int, target: int) -> Self:
        """The remapping with all its parameters, for a model of L = `window` tokens and N = `target`.

        Raises:
            RopepatchError: If its distances would leave the window, or there is no such remapping of this
                window.
        """
        derived = self.derived(window, max(window, target))
        mine = {name: value for name, value in derived.items() if getattr(self, name) is None}
        whole = self.model_copy(update=mine)
        whole.check_window(window)
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
    def check_window(self, window: int) -> None:
        """Refuse parameters that make no remapping of a window."""

    def reach(self, window: int) -> int | None:
        """The most tokens whose effective distances all stay below L; None where there is no end."""
        return None

    def bands(self) -> tuple[Band, ...]:
        """The bands, the nearest keys first. No parameter is None."""
        from ropepatch.attention import (
            modeling_position_remapping as modeling,
        )  # imports transformers: seconds

        own = {name: value for name, value in self.parameters().items() if name not in MODIFIERS}
        return modeling.REMAPPINGS[self.name](**own)

    def read_at(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The distances [Q, T] at which queries see keys, whatever their band: float64, NaN where unseen."""
        table = torch.tensor(torch.nan, dtype=torch.float64, device=keys.device)
        for band in self.bands():
            apart = band.query(queries)[:, None] - band.key(keys)
            table = torch.where(band.holds(queries, keys), apart.double(), table)
        return table

    def described(self) -> str:
        """The parameters, for a line."""
        given = self.model_dump(exclude_defaults=True)
        return ", ".join(
            f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in given.items()
        )


class _Windowed(Remapping):
    """A remapping that leaves distances below a window W unchanged."""

    window: Whole = FITTED

    def check_window(self, window: int) -> None:
        self._require(self.window < window, "window", f"below {window}")


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
        while self.model_copy(update={"window": own, "group": group}).reach(window) < target:
            group += 1
        return {"window": own, "group": group}

    def reach(self, window: int) -> int:
        return (window - self.window + self.window // self.group) * self.group


class DualChunk(Remapping):
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

    def check_window(self, window: int) -> None:
        self._require(self.clip < window, "clip", f"below {window}")
        self._require(self.chunk <= self.clip, "chunk", f"at most {self.clip}")


class LaMPE(Remapping):
    """Positions between a near and a far end are read as M of them; made for one N (Zhang et al. 2025).

    Args:
        length: N, in tokens.
        mapped: M; 0.6 L by default.
        head: h, the greatest distance that is unchanged; L/8 by default.
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

    def check_window(self, window: int) -> None:
        self._require(self.mapped < window, "mapped", f"below {window}")
        self._require(2 * self.head <= self.length, "head", f"at most {self.length // 2}")
        self._require(self.head + self.tail < self.length, "tail", f"below {self.length - self.head}")

    def reach(self, window: int) -> int | None:
        """N, or 0 where its parameters leave the window."""
        from ropepatch.attention.modeling_position_remapping import lampe_ends

        _, closer, farther = lampe_ends(self.length, self.mapped, self.head, self.tail)
        longest = max(self.length - 1 - farther, self.mapped + closer)
        return self.length if longest < window else 0


class Lambda(_Windowed):
    """Only the window and the first tokens are seen: what another remapping gains on it, far context brought.

    Args:
        window: W, in tokens; 3L/4 by default.
        sinks: k, the first tokens, which are seen from everywhere.
    """

    name = "lambda"
    control = True
    formula = "D below W; W for n < k; else unseen"
    paper = "arXiv:2308.16137"
    sinks: Count = 4

    def derived(self, window: int, target: int) -> dict[str, Any]:
        return {"window": max(1, 3 * window // 4)}


class String(Remapping):
    """Far positions are shifted over the ones that were seldom trained (An et al. 2024, STRING).

    Args:
        shift: S, in tokens; distances below it stay as they are; N/3 by default, more where N needs it, at
            most L.
        window: W, the distance that a key S tokens away is read at; L/32 by default.
    """

    name = "string"
    formula = "D below S, then D − S + W"
    paper = "arXiv:2410.18745"
    shift: Whole = FITTED
    window: Whole = FITTED

    def derived(self, window: int, target: int) -> dict[str, Any]:
        own = self.window or max(1, window // 32)
        return {"shift": max(1, min(max(target // 3, target - window + own), window)), "window": own}

    def check_window(self, window: int) -> None:
        self._require(self.shift <= window, "shift", f"at most {window}")
        self._require(self.window <= self.shift, "window", f"at most {self.shift}")

    def reach(self, window: int) -> int:
        return window + self.shift - self.window


REMAPPINGS: Registry[Remapping] = Registry(
    "remapping",
    (ReRoPE, LeakyReRoPE, SelfExtend, DualChunk, LaMPE, Lambda, String),
    other_names={
        "selfextend": "self-extend",
        "chunkllama": "dca",
        "dual-chunk": "dca",
        "lm-infinite": "lambda",
    },
)


def teaching_window(window: int) -> int:
    """The window of ReRoPE under which a model of L = `window` teaches a longer context: 3/4 L."""
    return max(1, 3 * window // 4)


def make_remapping(name: str, /, **parameters: Any) -> Remapping:
    """The remapping of that name with these parameters; those that are left out follow from L and N."""
    return REMAPPINGS.make(name, **parameters)
