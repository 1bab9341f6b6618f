"""Longer context for LLaMA-family checkpoints: plan, patch, measure, extend."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ropepatch.errors import RopepatchError

if TYPE_CHECKING:
    from ropepatch.adapted import load_adapter
    from ropepatch.checkpoint import extend
    from ropepatch.doctor import diagnose
    from ropepatch.encodings import ENCODINGS, Encoding, Swap, make_encoding, swap
    from ropepatch.evaluation.passkey import passkey
    from ropepatch.evaluation.perplexity import perplexity
    from ropepatch.fitting import Fitted, fit
    from ropepatch.folding import fold_attention
    from ropepatch.gguf_file import export_gguf
    from ropepatch.hub import push
    from ropepatch.loading import load
    from ropepatch.patching import Patch, active, patch
    from ropepatch.planning import Plan, plan
    from ropepatch.rope import Frequencies, Rope
    from ropepatch.scaling import METHODS, Scaling, make_scaling
    from ropepatch.training.adapting import adapt
    from ropepatch.training.recipe import read_recipe

__version__ = "0.1.0"

_HOME = {
    "ENCODINGS": "ropepatch.encodings",
    "Encoding": "ropepatch.encodings",
    "Swap": "ropepatch.encodings",
    "make_encoding": "ropepatch.encodings",
    "swap": "ropepatch.encodings",
    "METHODS": "ropepatch.scaling",
    "Fitted": "ropepatch.fitting",
    "Frequencies": "ropepatch.rope",
    "Patch": "ropepatch.patching",
    "Plan": "ropepatch.planning",
    "Rope": "ropepatch.rope",
    "adapt": "ropepatch.training.adapting",
    "load_adapter": "ropepatch.adapted",
    "read_recipe": "ropepatch.training.recipe",
    "Scaling": "ropepatch.scaling",
    "active": "ropepatch.patching",
    "diagnose": "ropepatch.doctor",
    "export_gguf": "ropepatch.gguf_file",
    "extend": "ropepatch.checkpoint",
    "fit": "ropepatch.fitting",
    "fold_attention": "ropepatch.folding",
    "load": "ropepatch.loading",
    "make_scaling": "ropepatch.scaling",
    "passkey": "ropepatch.evaluation.passkey",
    "patch": "ropepatch.patching",
    "perplexity": "ropepatch.evaluation.perplexity",
    "plan": "ropepatch.planning",
    "push": "ropepatch.hub",
}

__all__ = [
    "ENCODINGS",
    "METHODS",
    "Encoding",
    "Fitted",
    "Frequencies",
    "Patch",
    "Plan",
    "Rope",
    "RopepatchError",
    "Scaling",
    "Swap",
    "active",
    "adapt",
    "diagnose",
    "export_gguf",
    "extend",
    "fit",
    "fold_attention",
    "load",
    "load_adapter",
    "make_encoding",
    "make_scaling",
    "passkey",
    "patch",
    "perplexity",
    "plan",
    "push",
    "read_recipe",
    "swap",
]


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when something that needs them is asked for."""
    if name not in _HOME:
        raise AttributeError(f"module 'ropepatch' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
