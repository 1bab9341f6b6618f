"""What config.json must say for a scaling, proven by asking stock transformers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ropepatch.errors import RopepatchError
from ropepatch.extension.forms import SavedRope, saved_ropes
from ropepatch.model.architectures import SCALED_BY_DEFAULT
from ropepatch.model.config import legacy_keys, load_text_config
from ropepatch.model.rotary import SEQUENCE, float32_on_cpu, other_tables, stock_table
from ropepatch.model.survey import Survey
from ropepatch.scaling import Scaling
from ropepatch.scaling.rope import Frequencies


@float32_on_cpu()
def find_changes(survey: Survey, scaling: Scaling, to: int) -> tuple[SavedRope | None, dict[str, Any]]:
    """The first way to save that stock transformers computes to the bit, and what config.json says for it."""
    saved, distance = None, math.inf
    nulls = {"rope_scaling"} if survey.config.model_type in SCALED_BY_DEFAULT else set()
    for saved in _forms(survey, scaling, to):
        changes = _changes_of(survey, saved.rope_parameters, to)
        for older in (legacy_keys(survey.stated, saved.rope_parameters), {"rope_scaling": None}):
            candidate = changes | {
                key: value
                for key, value in older.items()
                if value is not None or key in survey.stated.keys() | nulls
            }
            distance = min(distance, _distance_from_stock(survey, candidate, saved.frequencies))
            if distance == 0:
                return saved, candidate
    if saved is None:
        return None, {}
    raise RopepatchError(
        f"{survey.config.model_type} computes other frequencies from every config.json tried "
        f"(off by {distance:.1e} at best)",
        hint="please report the model type: stock transformers must agree before anything is written",
    )


def _forms(survey: Survey, scaling: Scaling, to: int) -> Iterator[SavedRope]:
    """The ways to say a scaling; last the ones for a share of each head that the default rope ignores."""
    current = survey.site.of(survey.config.rope_parameters)
    yield from saved_ropes(scaling, survey.rope, current, to)
    if "partial_rotary_factor" in current:
        yield from saved_ropes(scaling, survey.rope, current | {"partial_rotary_factor": 1.0}, to)


def _changes_of(survey: Survey, parameters: dict[str, Any], to: int) -> dict[str, Any]:
    config, window = survey.config, survey.rope.original_max_position_embeddings
    # `dynamic` takes L from max_position_embeddings: the target there would switch it off up to the target.
    reach = window if parameters["rope_type"] == "dynamic" else to
    changes: dict[str, Any] = {
        config.attribute_map.get("max_position_embeddings", "max_position_embeddings"): reach,
        "rope_parameters": survey.site.replaced(config.rope_parameters, parameters),
    }
    key = "original_max_position_embeddings"
    if key in parameters or hasattr(config, key):
        # The top level wins over the nested key in transformers 5, and is the only one some engines read.
        changes[key] = parameters.get(key, window)
    if SEQUENCE in survey.stated:  # vLLM and FastChat serve no more than it says
        changes[SEQUENCE] = reach
    if getattr(config, "head_dim", 0) is None:
        changes["head_dim"] = config.hidden_size // config.num_attention_heads
    return changes


def changed(raw: dict[str, Any], survey: Survey, changes: dict[str, Any]) -> dict[str, Any]:
    """The content of config.json with changes in its language-model section, or at the top without one."""
    stated = survey.stated_in(raw) | changes
    return stated if survey.section is None else raw | {survey.section: stated}


def _distance_from_stock(survey: Survey, changes: dict[str, Any], expected: Frequencies) -> float:
    """0 where stock transformers computes these frequencies to the bit, infinity where it refuses to."""
    try:
        config = load_text_config(changed(survey.raw, survey, changes), survey.own_config)
        distance = stock_table(config, survey.site).distance(expected)
    except RopepatchError:
        return math.inf
    return (
        distance
        if other_tables(config, survey.site) == other_tables(survey.config, survey.site)
        else math.inf
    )
