"""What every attention map is: a frozen set of parameters, filled in from L and N, and its bands."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from ropepatch.attention.bands import Band, Kept, Place, behind, distances, same, start
from ropepatch.errors import RopepatchError
from ropepatch.settings.parameters import AboveOne, Checked, Positive, WholeFromOne

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
    kind: ClassVar[str] = "attention map"
    formula: ClassVar[str]  # one line, for tables
    paper: ClassVar[str]
    control: ClassVar[bool] = False  # whether it is there to be measured beside others, and never chosen
    saved_as: ClassVar[str] = "code beside it"
    length_dependent: ClassVar[bool] = False
    kept_for: ClassVar[int] = 1  # the band that reads keys where a cache has them: the one of the most keys
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

    def kept(self) -> Kept:
        """Where keys stand in a cache; for equal maps the same."""
        return _kept(self)

    def read_at(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The distances [Q, T] at which queries read keys, whatever their band: float64, NaN where unseen."""
        return distances(self.bands(), queries, keys)

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


@lru_cache(maxsize=64)
def _kept(one: AttentionMap) -> Kept:
    nearest, place = one.bands()[0], one.bands()[one.kept_for].key
    if place in (nearest.key, start):  # the nearest keys are turned once
        return Kept(place)
    return Kept(place, 1 - int(nearest.begin(torch.tensor(0))))


def constant(place: int) -> Place:
    """The same place for all positions."""
    return lambda positions: torch.full_like(positions, place)


def near_band(window: int) -> Band:
    """Distances below a window, as they are."""
    return Band(behind(window), behind(0), same, same)


def far_band(window: int, query: Place, key: Place) -> Band:
    """Distances from a window on."""
    return Band(start, behind(window), query, key)
