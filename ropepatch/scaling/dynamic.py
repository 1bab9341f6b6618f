"""Dynamic NTK at one fixed length: changing the frequencies later would invalidate the KV cache."""

from __future__ import annotations

from typing import Any, Literal

from ropepatch.scaling.powers import NTKAware
from ropepatch.scaling.rope import Rope, Scaling


class DynamicNTK(NTKAware):
    """NTK-aware scaling by the prompt length l (YaRN paper, 3.3), which ropepatch fixes at the target.

    Args:
        form: "paper": s(l) = max(1, l/L). "transformers": s(l) = s l/L - (s - 1) beyond L, which
            overshoots (13 at l = 4 L and s = 4).
    """

    name = "dynamic"
    formula = "NTK-aware with s(l) = max(1, l/L)"
    paper = "arXiv:2309.00071"
    saved_as = "dynamic"
    length_dependent = True
    # The rope type cannot contain the frequencies of an earlier scaling
    composes = False
    form: Literal["paper", "transformers"] = "paper"

    @property
    def _f(self) -> float:
        return 1.0 if self.form == "paper" else float(self.factor)

    def at(self, rope: Rope, length: int | None) -> Scaling:
        window = rope.original_max_position_embeddings
        s = max(1.0, (length or 0) / window)
        return NTKAware(factor=self._f * s - (self._f - 1))

    def _native(self, rope: Rope) -> dict[str, Any]:
        return {"rope_type": "dynamic", "factor": self._f}
