"""Causal attention with remapped positions (Self-Extend, DCA, ...), which no RoPE scaling can express.

`modeling_position_remapping` computes it, here and as code in saved checkpoints. `remappings` defines the
published ones, and `remapped.remap_positions` applies one to a loaded model.
"""

from __future__ import annotations

from ropepatch.attention.remappings import REMAPPINGS as REMAPPINGS
from ropepatch.attention.remappings import Remapping as Remapping
from ropepatch.attention.remappings import make_remapping as make_remapping
from ropepatch.attention.remappings import teaching_window as teaching_window
