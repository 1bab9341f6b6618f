"""Longer context for RoPE checkpoints: plan, patch, measure, extend."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ropepatch import api
from ropepatch.api import *  # noqa: F403
from ropepatch.errors import RopepatchError as RopepatchError

if TYPE_CHECKING:  # the names in LATER, for mypy and editors
    from ropepatch.attention import REMAPPINGS as REMAPPINGS
    from ropepatch.attention import Remapped as Remapped
    from ropepatch.attention import Remapping as Remapping
    from ropepatch.attention import make_remapping as make_remapping
    from ropepatch.encodings import ENCODINGS as ENCODINGS
    from ropepatch.encodings import Encoding as Encoding
    from ropepatch.encodings import Swap as Swap
    from ropepatch.encodings import make_encoding as make_encoding
    from ropepatch.extension.patching import Patch as Patch
    from ropepatch.extension.planning import Plan as Plan
    from ropepatch.pipeline.choice import Choice as Choice
    from ropepatch.pipeline.extension import Extension as Extension
    from ropepatch.pipeline.results import Results as Results
    from ropepatch.probing.asking import Probed as Probed
    from ropepatch.probing.callback import ProbeCallback as ProbeCallback
    from ropepatch.scaling import METHODS as METHODS
    from ropepatch.scaling import Scaling as Scaling
    from ropepatch.scaling import make_scaling as make_scaling
    from ropepatch.scaling.rope import Frequencies as Frequencies
    from ropepatch.scaling.rope import Rope as Rope
    from ropepatch.training.adapter import load_adapter as load_adapter

__version__ = "0.1.0"

LATER = {  # modules of the public names outside `api`, imported when used because it takes seconds
    "attention": "REMAPPINGS Remapping Remapped make_remapping",
    "encodings": "ENCODINGS Encoding Swap make_encoding",
    "extension.patching": "Patch",
    "extension.planning": "Plan",
    "pipeline.choice": "Choice",
    "pipeline.extension": "Extension",
    "pipeline.results": "Results",
    "probing.asking": "Probed",
    "probing.callback": "ProbeCallback",
    "scaling": "METHODS Scaling make_scaling",
    "scaling.rope": "Frequencies Rope",
    "training.adapter": "load_adapter",
}
_HOME = {name: f"ropepatch.{module}" for module, names in LATER.items() for name in names.split()}
__all__ = sorted([*api.__all__, *_HOME, "RopepatchError"])


def __getattr__(name: str) -> Any:
    """Import a module of `LATER` when one of its names is used."""
    if name not in _HOME:
        raise AttributeError(f"module 'ropepatch' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
