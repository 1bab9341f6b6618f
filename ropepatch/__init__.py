"""Longer context for LLaMA-family checkpoints: plan, patch, measure, extend."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ropepatch.errors import RopepatchError as RopepatchError

if TYPE_CHECKING:  # the public names for mypy and editors
    from ropepatch.attention import MAPS as MAPS
    from ropepatch.attention import AttentionMap as AttentionMap
    from ropepatch.attention import make_map as make_map
    from ropepatch.doctor import diagnose as diagnose
    from ropepatch.encodings import ENCODINGS as ENCODINGS
    from ropepatch.encodings import Encoding as Encoding
    from ropepatch.encodings import Swap as Swap
    from ropepatch.encodings import make_encoding as make_encoding
    from ropepatch.encodings import swap as swap
    from ropepatch.encodings.loading import load as load
    from ropepatch.evaluation.perplexity import perplexity as perplexity
    from ropepatch.evaluation.retrieval import passkey as passkey
    from ropepatch.evaluation.retrieval import retrieve as retrieve
    from ropepatch.extension.patching import Patch as Patch
    from ropepatch.extension.patching import active as active
    from ropepatch.extension.patching import patch as patch
    from ropepatch.extension.planning import Plan as Plan
    from ropepatch.extension.planning import plan as plan
    from ropepatch.fitting import Fitted as Fitted
    from ropepatch.fitting import fit as fit
    from ropepatch.gallery.explorer import explore as explore
    from ropepatch.pipeline.choice import Choice as Choice
    from ropepatch.pipeline.choice import choose as choose
    from ropepatch.pipeline.choice import compare as compare
    from ropepatch.pipeline.evaluation import evaluate as evaluate
    from ropepatch.pipeline.extension import Extension as Extension
    from ropepatch.pipeline.extension import extend as extend
    from ropepatch.pipeline.results import Results as Results
    from ropepatch.pipeline.results import plot as plot
    from ropepatch.pipeline.results import read_results as read_results
    from ropepatch.probing import Probed as Probed
    from ropepatch.probing import probe as probe
    from ropepatch.publishing.folding import fold_attention as fold_attention
    from ropepatch.publishing.hub import push as push
    from ropepatch.scaling import METHODS as METHODS
    from ropepatch.scaling import Scaling as Scaling
    from ropepatch.scaling import make_scaling as make_scaling
    from ropepatch.scaling.rope import Frequencies as Frequencies
    from ropepatch.scaling.rope import Rope as Rope
    from ropepatch.training.adaptation import adapt as adapt
    from ropepatch.training.adapter import load_adapter as load_adapter
    from ropepatch.training.recipe import read_recipe as read_recipe

__version__ = "0.1.0"


_HOME = {  # the module of every public name
    name: f"ropepatch.{module}"
    for module, names in {
        "attention": "MAPS AttentionMap make_map",
        "doctor": "diagnose",
        "encodings": "ENCODINGS Encoding Swap make_encoding swap",
        "encodings.loading": "load",
        "evaluation.perplexity": "perplexity",
        "evaluation.retrieval": "passkey retrieve",
        "extension.patching": "Patch active patch",
        "extension.planning": "Plan plan",
        "fitting": "Fitted fit",
        "gallery.explorer": "explore",
        "pipeline.choice": "Choice choose compare",
        "pipeline.evaluation": "evaluate",
        "pipeline.extension": "Extension extend",
        "pipeline.results": "Results plot read_results",
        "probing": "Probed probe",
        "publishing.folding": "fold_attention",
        "publishing.hub": "push",
        "scaling": "METHODS Scaling make_scaling",
        "scaling.rope": "Frequencies Rope",
        "training.adaptation": "adapt",
        "training.adapter": "load_adapter",
        "training.recipe": "read_recipe",
    }.items()
    for name in names.split()
}
__all__ = sorted(["RopepatchError", *_HOME])


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when something that needs them is asked for."""
    if name not in _HOME:
        raise AttributeError(f"module 'ropepatch' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
