"""What a method, an encoding and a recipe are, as JSON-ready data for `--json`, tables and the catalogue."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from ropepatch.cli.listing import REQUIRED

if TYPE_CHECKING:
    from ropepatch.encodings.encoding import Encoding
    from ropepatch.training.recipe import Recipe


def describe_method(method: Any) -> dict[str, Any]:
    """Of a method, with the defaults of its parameters, or of a scaling, with what they are."""
    return {
        "method": method.name,
        "kind": method.kind,
        "formula": method.formula,
        "paper": method.paper,
        "saved_as": method.saved_as,
        "length_dependent": method.length_dependent,
        "parameters": _defaults(method) if isinstance(method, type) else method.parameters(),
        "help": inspect.getdoc(method),
    }


def describe_encoding(kind: type[Encoding]) -> dict[str, Any]:
    """Of an encoding, with the defaults of its parameters."""
    return {
        "encoding": kind.name,
        "family": kind.family,
        "formula": kind.formula,
        "paper": kind.paper,
        "parameters": _defaults(kind),
        "help": inspect.getdoc(kind),
    }


def _defaults(kind: Any) -> dict[str, Any]:
    return {key: REQUIRED if default is ... else default for key, default in kind.defaults().items()}


def describe_recipe(name: str, recipe: Recipe) -> dict[str, Any]:
    """Of a recipe, what it does to a model, with an estimate where the configuration of that is known."""
    from ropepatch.settings import relative_length
    from ropepatch.training.forecast import Estimate, published_config

    config, estimate = published_config(recipe.model), Estimate.of(recipe)
    trained = config["max_position_embeddings"] if config else None
    return {
        "recipe": name,
        "model": recipe.model,
        "from": trained,
        "to": relative_length(recipe.to, trained) if trained else recipe.to,
        "method": recipe.method.label,
        "positions": recipe.positions.model_dump(mode="json"),
        "trained": _trained(recipe),
        "steps": recipe.max_steps,
        "estimate": estimate.to_dict() if estimate else None,
    }


def _trained(recipe: Recipe) -> str:
    lora = recipe.lora
    if lora is None:
        return "all weights"
    parts = {"embeddings": lora.train_embeddings, "norms": lora.train_norms}
    return ", ".join([f"LoRA r {lora.r}", *(part for part, chosen in parts.items() if chosen)])
