"""What the structure of a model does not tell: exceptions by architecture."""

from __future__ import annotations

_NORMALISED = "queries and keys are normalised after rotation here: an attention factor changes nothing"
_LOCAL_ONLY = "only the sliding-window layers rotate here: the global layers need no scaling to read farther"
ARCHITECTURE_NOTES = {  # what a user should know that the structure does not tell
    "cohere2": _LOCAL_ONLY,
    "cohere2_moe": _LOCAL_ONLY,
    "hunyuan_v1_dense": _NORMALISED,
    "hunyuan_v1_moe": _NORMALISED,
    "llama4_text": _NORMALISED,
    "nanochat": _NORMALISED,
}
