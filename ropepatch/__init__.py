"""Longer context for RoPE checkpoints: plan, patch, measure, extend, train."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ropepatch.errors import RopepatchError as RopepatchError

if TYPE_CHECKING:  # the names in HOMES, for mypy and editors
    from ropepatch.attention import REMAPPINGS as REMAPPINGS
    from ropepatch.attention import Remapping as Remapping
    from ropepatch.attention import make_remapping as make_remapping
    from ropepatch.attention.remapped import Remapped as Remapped
    from ropepatch.doctor.diagnosis import diagnose as diagnose
    from ropepatch.encodings import ENCODINGS as ENCODINGS
    from ropepatch.encodings import Encoding as Encoding
    from ropepatch.encodings import make_encoding as make_encoding
    from ropepatch.encodings.loading import load as load
    from ropepatch.encodings.swapping import Swap as Swap
    from ropepatch.encodings.swapping import swap as swap
    from ropepatch.evaluation.intervals import difference as difference
    from ropepatch.evaluation.perplexity import perplexity as perplexity
    from ropepatch.evaluation.retrieval import passkey as passkey
    from ropepatch.evaluation.retrieval import retrieve as retrieve
    from ropepatch.extension.patching import Patch as Patch
    from ropepatch.extension.patching import patch as patch
    from ropepatch.extension.planning import Plan as Plan
    from ropepatch.extension.planning import plan as plan
    from ropepatch.gallery.explorer.page import explore as explore
    from ropepatch.probing.asking import Probed as Probed
    from ropepatch.probing.asking import probe as probe
    from ropepatch.probing.trainer import ProbeCallback as ProbeCallback
    from ropepatch.publishing.folding import fold_attention as fold_attention
    from ropepatch.publishing.hub import push as push
    from ropepatch.scaling import METHODS as METHODS
    from ropepatch.scaling import Scaling as Scaling
    from ropepatch.scaling import make_scaling as make_scaling
    from ropepatch.scaling.rope import Frequencies as Frequencies
    from ropepatch.scaling.rope import Rope as Rope
    from ropepatch.training.adapter import load_adapter as load_adapter
    from ropepatch.training.recipe import read_recipe as read_recipe
    from ropepatch.verbs.active import active as active
    from ropepatch.verbs.compare import Choice as Choice
    from ropepatch.verbs.compare import compare as compare
    from ropepatch.verbs.compare import plot as plot
    from ropepatch.verbs.evaluate import Results as Results
    from ropepatch.verbs.evaluate import evaluate as evaluate
    from ropepatch.verbs.evaluate import read_results as read_results
    from ropepatch.verbs.extend import Extension as Extension
    from ropepatch.verbs.extend import extend as extend
    from ropepatch.verbs.train import train as train

__version__ = "0.1.0"

HOMES = {  # modules of the public names, imported when used because it takes seconds
    "attention": "REMAPPINGS Remapping make_remapping",
    "attention.remapped": "Remapped",
    "doctor.diagnosis": "diagnose",
    "encodings": "ENCODINGS Encoding make_encoding",
    "encodings.loading": "load",
    "encodings.swapping": "Swap swap",
    "evaluation.intervals": "difference",
    "evaluation.perplexity": "perplexity",
    "evaluation.retrieval": "passkey retrieve",
    "extension.patching": "Patch patch",
    "extension.planning": "Plan plan",
    "gallery.explorer.page": "explore",
    "probing.asking": "Probed probe",
    "probing.trainer": "ProbeCallback",
    "publishing.folding": "fold_attention",
    "publishing.hub": "push",
    "scaling": "METHODS Scaling make_scaling",
    "scaling.rope": "Frequencies Rope",
    "training.adapter": "load_adapter",
    "training.recipe": "read_recipe",
    "verbs.active": "active",
    "verbs.compare": "Choice compare plot",
    "verbs.evaluate": "Results evaluate read_results",
    "verbs.extend": "Extension extend",
    "verbs.train": "train",
}
HOME = {
    name: f"ropepatch.{module}"
    for module, names in HOMES.items()
    for name in names.split()
}
__all__ = sorted([*HOME, "RopepatchError"])


def __getattr__(name: str) -> Any:
    """Import the module of a public name when the name is used."""
    if name not in HOME:
        raise AttributeError(f"module 'ropepatch' has no attribute {name!r}")
    return getattr(importlib.import_module(HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
