"""Causal attention with remapped positions (Self-Extend, DCA, ...), which no RoPE scaling can express.

`modeling_position_remapping` computes it, here and as code in saved checkpoints. `remappings` defines the
published ones, and `remapped.remap_positions` applies one to a loaded model.
"""

from ropepatch.attention.remappings import (
    REMAPPINGS,
    Remapping,
    find_method,
    make_remapping,
    teaching_window,
)

__all__ = [
    "REMAPPINGS",
    "Remapping",
    "find_method",
    "make_remapping",
    "teaching_window",
]
