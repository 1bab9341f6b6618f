"""Causal attention with remapped positions (Self-Extend, DCA, ...), which no table of frequencies can give.

`modeling_attention_map` computes it, here and where it is saved beside weights; `maps` are the published
ones, and `map_attention` puts one into a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ropepatch.attention.maps import MAPS as MAPS
from ropepatch.attention.maps import AttentionMap as AttentionMap
from ropepatch.attention.maps import make_map as make_map
from ropepatch.attention.maps import teaching_window as teaching_window

if TYPE_CHECKING:
    from ropepatch.attention.mapping import Mapped as Mapped
    from ropepatch.attention.mapping import map_attention as map_attention
    from ropepatch.attention.mapping import mapped as mapped


def __getattr__(name: str) -> Any:
    """Import `mapping`, and transformers with it, only where one of its names is asked for."""
    if name in ("Mapped", "map_attention", "mapped"):
        from ropepatch.attention import mapping

        return getattr(mapping, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
