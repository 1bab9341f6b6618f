"""Causal attention with remapped positions (Self-Extend, DCA, ...), which no RoPE scaling can express.

`modeling_position_remapping` computes it, here and as code in saved checkpoints. `remappings` defines the
published ones, and `remap_positions` applies one to a loaded model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ropepatch.attention.remappings import REMAPPINGS as REMAPPINGS
from ropepatch.attention.remappings import Remapping as Remapping
from ropepatch.attention.remappings import make_remapping as make_remapping
from ropepatch.attention.remappings import teaching_window as teaching_window

if TYPE_CHECKING:
    from ropepatch.attention.remapped import Remapped as Remapped
    from ropepatch.attention.remapped import mapped as mapped
    from ropepatch.attention.remapped import remap_positions as remap_positions


def __getattr__(name: str) -> Any:
    """Import `remapped`, and with it transformers, only when one of its names is used."""
    if name in ("Remapped", "remap_positions", "mapped"):
        from ropepatch.attention import remapped as handles

        return getattr(handles, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
