"""What is known of an architecture before anything is computed from it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ropepatch.model.checks.case import Case, positive
from ropepatch.model.checks.findings import CONFIG, Finding, Key
from ropepatch.model.checks.interpretation import configured
from ropepatch.model.traits import HARM, hard_to_extend


def known_hard(case: Case) -> Iterator[Finding]:
    """Features that together make a model hard to extend."""
    if isinstance(config := configured(case.raw), str):
        return
    stated = positive(getattr(config, "max_position_embeddings", None)) or math.inf
    window = max(filter(None, map(case.original, case.blocks)), default=stated)
    if features := hard_to_extend(config, window):
        yield Key(CONFIG, ("model_type",), case.model_type).remark(
            "hard-to-extend",
            f"{len(features)} of four features that add up: {', '.join(features)}",
            HARM,
            "measure what it finds at the target, not its loss alone: ropepatch compare",
        )
