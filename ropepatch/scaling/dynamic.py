"""Methods that follow the length. Each is told it once: moving tables contradict the keys in the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ropepatch.scaling.method import LengthDependent, Scaling
from ropepatch.scaling.powers import NTKAware, PositionInterpolation
from ropepatch.scaling.ramps import YaRN
from ropepatch.scaling.rope import Rope


def stretch(rope: Rope, length: int | None) -> float:
    """s(l) = max(1, l/L): how far the planned length exceeds the window."""
    return max(1.0, (length or 0) / rope.original_max_position_embeddings)


@dataclass(frozen=True, kw_only=True)
class DynamicNTK(LengthDependent):
    """NTK-aware at the planned length (YaRN paper, section 3.3).

    Args:
        form: "paper", s(l) = max(1, l/L); "transformers", s(l) = f l/L - (f - 1) beyond L with f = factor,
            which overshoots: 13 at l = 4 L and f = 4.
    """

    name = "dynamic"
    formula = "NTK-aware with s(l) = max(1, l/L)"
    paper = "arXiv:2309.00071"
    saved_as = "dynamic"

    form: Literal["paper", "transformers"] = "paper"

    @property
    def _f(self) -> float:
        return 1.0 if self.form == "paper" else float(self.factor)

    def at(self, rope: Rope, length: int | None) -> Scaling:
        return NTKAware(factor=self._f * stretch(rope, length) - (self._f - 1))

    def native(self, rope: Rope) -> dict[str, Any] | None:
        return None if rope.is_scaled else {"rope_type": "dynamic", "factor": self._f}


@dataclass(frozen=True, kw_only=True)
class DynamicLinear(LengthDependent):
    """Position interpolation at the planned length."""

    name = "dynamic-linear"
    formula = "θ_i / s(l), s(l) = max(1, l/L)"
    paper = "arXiv:2309.00071"
    saved_as = "–"

    def at(self, rope: Rope, length: int | None) -> Scaling:
        return PositionInterpolation(factor=stretch(rope, length))


@dataclass(frozen=True, kw_only=True)
class DynamicYaRN(LengthDependent, YaRN):
    """YaRN at the planned length, with its temperature and parameters (jquesnelle/yarn)."""

    name = "dynamic-yarn"
    formula = "YaRN with s(l) = max(1, l/L)"
    paper = "arXiv:2309.00071"
    saved_as = "–"

    def at(self, rope: Rope, length: int | None) -> Scaling:
        return YaRN(factor=stretch(rope, length), **self.parameters())

    def native(self, rope: Rope) -> None:
        return None
