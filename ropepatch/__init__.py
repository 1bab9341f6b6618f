"""Longer context for LLaMA-family checkpoints: plan, patch, measure, extend."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ropepatch.errors import RopepatchError

if TYPE_CHECKING:
    from ropepatch.doctor import diagnose
    from ropepatch.encodings import ENCODINGS, Encoding, Swap, make_encoding, swap
    from ropepatch.encodings.loading import load
    from ropepatch.evaluation.passkey import passkey
    from ropepatch.evaluation.perplexity import perplexity
    from ropepatch.extension.patching import Patch, active, patch
    from ropepatch.extension.planning import Plan, plan
    from ropepatch.extension.writing import extend
    from ropepatch.fitting import Fitted, fit
    from ropepatch.publishing.folding import fold_attention
    from ropepatch.publishing.gguf import export_gguf
    from ropepatch.publishing.hub import push
    from ropepatch.scaling import METHODS, Scaling, make_scaling
    from ropepatch.scaling.rope import Frequencies, Rope
    from ropepatch.training.adaptation import adapt
    from ropepatch.training.adapted import load_adapter
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
    "Frequencies": "ropepatch.scaling.rope",
    "Patch": "ropepatch.extension.patching",
    "Plan": "ropepatch.extension.planning",
    "Rope": "ropepatch.scaling.rope",
    "adapt": "ropepatch.training.adaptation",
    "load_adapter": "ropepatch.training.adapted",
    "read_recipe": "ropepatch.training.recipe",
    "Scaling": "ropepatch.scaling",
    "active": "ropepatch.extension.patching",
    "diagnose": "ropepatch.doctor",
    "export_gguf": "ropepatch.publishing.gguf",
    "extend": "ropepatch.extension.writing",
    "fit": "ropepatch.fitting",
    "fold_attention": "ropepatch.publishing.folding",
    "load": "ropepatch.encodings.loading",
    "make_scaling": "ropepatch.scaling",
    "passkey": "ropepatch.evaluation.passkey",
    "patch": "ropepatch.extension.patching",
    "perplexity": "ropepatch.evaluation.perplexity",
    "plan": "ropepatch.extension.planning",
    "push": "ropepatch.publishing.hub",
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
