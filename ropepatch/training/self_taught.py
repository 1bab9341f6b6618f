"""Size the recipe of a self-distillation: the longest training sequences that the device can process."""

from __future__ import annotations

import copy
from typing import Any

from ropepatch.attention import teaching_window
from ropepatch.attention.remapped import check_mappable
from ropepatch.data.positions import TrueLength
from ropepatch.errors import RopepatchError
from ropepatch.model.checkpoint import Checkpoint, InMemory
from ropepatch.model.config import Config, text_config
from ropepatch.model.cost import GIB
from ropepatch.model.precision import best_device, fastest, memory_of
from ropepatch.settings import relative_length
from ropepatch.training.adapter import Weights
from ropepatch.training.forecast import training_cost
from ropepatch.training.recipe import Recipe, remapping_of

BETWEEN = (4, 2)  # multiples of L that are tried as lengths if the target is too long
SHARE = 3 / 4  # of the memory of a device
MOST_HOURS = 1.0
SMALL = 128  # the hidden size above which the learning rate falls as its inverse


def sized(
    recipe: Recipe, source: Checkpoint | InMemory, target: int
) -> tuple[Recipe, str]:
    """Set the training sequences of a recipe as long as the device allows, and its learning rate.

    The device must have the memory and finish in about an hour. The lengths tried are the target, then 4 and
    2 times the original length at skipped positions, then the original length.

    Returns:
        The recipe, and a line with the length and the reason.
    """
    config = source.config
    trained = config.window
    model: Any = copy.deepcopy(config.skeleton)  # `Weights.of` adds an adapter
    recipe = _of_model(recipe, source.name, text_config(model.config).hidden_size)
    distances = {"name": "rerope", "window": teaching_window(trained)}
    reason = ""  # for sequences shorter than the target
    try:
        check_mappable(model, trained)
        remapping_of(distances).fitted(trained, target)
    except RopepatchError as error:
        reason = f": the base model does not support position remapping ({error})"
    else:
        counted = Weights.of(model, recipe.lora)
        for length in [
            target,
            *(times * trained for times in BETWEEN if times * trained < target),
        ]:
            longer = _longer(recipe, length, target, trained, distances)
            for recomputed in (False, True):
                tried = longer.model_copy(update={"gradient_checkpointing": recomputed})
                too_long = _too_long(tried, config, counted, target)
                if too_long is None:
                    rows = (
                        " (the target length)"
                        if length == target
                        else " at skipped positions"
                    )
                    return (
                        tried,
                        f"training on sequences of {length:,} tokens{rows}{reason}",
                    )
            reason = reason or f": {length:,} tokens {too_long}"
    length = min(trained, relative_length(recipe.data.tokens_per_batch, trained))
    data = recipe.data.model_copy(update={"windows": (length,)})
    note = f"training on sequences of {length:,} tokens at skipped positions{reason}"
    return recipe.model_copy(update={"data": data}), note


def _of_model(recipe: Recipe, name: str, hidden_size: int) -> Recipe:
    """Set the model, and the learning rate for its hidden size."""
    assert recipe.distil is not None
    rate = recipe.trainer["learning_rate"] * min(1.0, SMALL / hidden_size)
    changes = {
        "model": name,
        "trainer": recipe.trainer | {"learning_rate": float(f"{rate:.2g}")},
        "distil": recipe.distil.model_copy(update={"auto_size": False}),
    }
    return recipe.model_copy(update=changes)


def _longer(
    recipe: Recipe, length: int, target: int, trained: int, distances: dict[str, Any]
) -> Recipe:
    """Set training sequences beyond the original length, also of shorter documents."""
    room = max(length, relative_length(recipe.data.tokens_per_batch, trained))
    windows = {"windows": (length,), "tokens_per_batch": room, "boundaries": False}
    changes: dict[str, Any] = {"data": recipe.data.model_copy(update=windows)}
    assert recipe.distil is not None
    changes["distil"] = recipe.distil.model_copy(update={"remapping": distances})
    if length == target:
        changes["positions"] = TrueLength()
    return recipe.model_copy(update=changes)


def _too_long(
    recipe: Recipe, config: Config, counted: Weights, target: int
) -> str | None:
    """Say why the sequences of a recipe are too long for the device; None if they are not."""
    device = best_device()
    cost = training_cost(
        recipe,
        config.whole,
        counted,
        dtype=recipe.precision or fastest(device).dtype,
        window=config.window,
        target=target,
        device=device,
    )
    available = SHARE * memory_of(device) / GIB
    if cost.memory > available:
        return f"take {cost.memory:.2g} GiB of {available:.2g}"
    if cost.hours > MOST_HOURS:
        return f"take {cost.hours:.1f} h on {cost.card}"
    return None
