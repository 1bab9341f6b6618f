"""The recipe that `distil` means for a model: the longest rows that this machine trains on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ropepatch.attention.mapping import check_mappable
from ropepatch.data.texts import Texts
from ropepatch.errors import RopepatchError
from ropepatch.model.config import blueprint, load_config, text_config
from ropepatch.model.precision import fastest, memory_of
from ropepatch.model.survey import Survey
from ropepatch.settings import relative_length
from ropepatch.training.forecast import GIB, Widths, memory
from ropepatch.training.positions import TrueLength
from ropepatch.training.preparation import Weights
from ropepatch.training.recipe import Recipe, map_of, read_recipe

DISTIL = "distil"  # the name of the recipe
WINDOW = 3 / 4  # of L: the window of ReRoPE, under which the teacher reads
BETWEEN = (4, 2)  # in multiples of L, the rows that are tried where those of the target are too long
HOUR = {"cpu": 5e14, "cuda": 1e18}  # operations, about, of two cores and of an H100
SHARE = 3 / 4  # of the memory of a device
SMALL = 128  # the hidden size above which the learning rate falls as its inverse
PASSES = 4  # forward passes that a step is worth: the teacher's, the student's, and the backward pass


def self_taught(survey: Survey, target: int, trained: int, text: Texts | None) -> tuple[Recipe, str]:
    """Fit the recipe `distil` to a model: rows of the target, if the device can train on them.

    Can means: it has the memory, and is done in about an hour. Else rows of 4 or 2 times the old context at
    skipped positions, and else rows within the old context.

    Args:
        survey: The model's.
        target: N, in tokens.
        trained: L, in tokens.
        text: What is read; None for what the model writes itself.

    Returns:
        The recipe, and a line that says which rows it reads, and why no longer ones.
    """
    recipe = read_recipe(DISTIL)
    config: Any = text_config(load_config(survey.raw))
    rate = recipe.trainer["learning_rate"] * min(1.0, SMALL / config.hidden_size)
    changes: dict[str, Any] = {"trainer": recipe.trainer | {"learning_rate": float(f"{rate:.2g}")}}
    if text is not None:
        changes["data"] = recipe.data.model_copy(update={"sources": (text,)})
    recipe = recipe.model_copy(update=changes)
    room = relative_length(recipe.data.tokens_per_batch, trained)
    reasons: list[str] = []  # the first is that of rows of the target
    try:
        device = Device.of(survey, recipe, target, trained)
        for length in [target, *(times * trained for times in BETWEEN if times * trained < target)]:
            longer = _rows(recipe, length, max(room, length), target, trained)
            for recomputed in (False, True):
                tried = longer.model_copy(update={"gradient_checkpointing": recomputed})
                if (reason := device.refusal(tried)) is None:
                    return tried, f"distil reads {_described(length, target)}" + "".join(reasons[:1])
            reasons.append(f": of {length:,} tokens they {reason}")
    except RopepatchError as error:
        reasons.append(f": the base cannot be mapped ({error})")
    length = min(trained, room)
    return _rows(
        recipe, length, room, target, trained
    ), f"distil reads {_described(length, target)}{reasons[0]}"


def _rows(recipe: Recipe, length: int, room: int, target: int, trained: int) -> Recipe:
    """The recipe with rows of a length; documents are shorter than those beyond the old context."""
    changes: dict[str, Any] = {"windows": (length,), "tokens_per_batch": room}
    update: dict[str, Any] = {}
    if length > trained:
        assert recipe.distil is not None
        window = max(1, int(WINDOW * trained))
        update["distil"] = recipe.distil.model_copy(update={"map": {"name": "rerope", "window": window}})
        changes["boundaries"] = False
    if length == target:
        update["positions"] = TrueLength()
    return recipe.model_copy(update=update | {"data": recipe.data.model_copy(update=changes)})


def _described(length: int, target: int) -> str:
    return f"rows of {length:,} tokens" + (", the target" if length == target else " at skipped positions")


@dataclass(frozen=True, eq=False)
class Device:
    """The device that trains, and what it trains."""

    name: str
    dtype: str
    config: Any
    counted: Weights
    target: int
    trained: int

    @classmethod
    def of(cls, survey: Survey, recipe: Recipe, target: int, trained: int) -> Device:
        """That of this process.

        Raises:
            RopepatchError: If no map can be put on the model.
        """
        model: Any = blueprint(load_config(survey.raw))
        check_mappable(model, trained)
        longest = _rows(recipe, target, target, target, trained).distil
        assert longest is not None
        map_of(longest.map).fitted(trained, target)
        name, config = "cuda" if torch.cuda.is_available() else "cpu", text_config(model.config)
        counted = Weights.of(model, recipe)
        return cls(name, recipe.precision or fastest(name).dtype, config, counted, target, trained)

    def refusal(self, recipe: Recipe) -> str | None:
        """Why rows are too long; None where they are not."""
        needed = memory(recipe, self.config, self.counted, self.dtype, self.trained, self.target).total_gib
        if needed > (there := SHARE * memory_of(self.name) / GIB):
            return f"take {needed:.2g} GiB of {there:.2g}"
        (length,), room = recipe.data.lengths(self.trained)
        layers, queries = int(self.config.num_hidden_layers), Widths.of(self.config).queries
        for_token = 2 * self.counted.all + 2 * layers * queries * length
        work = PASSES * recipe.max_steps * room // length * length * for_token
        if work > HOUR[self.name]:
            return (
                f"take {work:.0e} operations, and a {self.name} does about {HOUR[self.name]:.0e} in an hour"
            )
        return None
