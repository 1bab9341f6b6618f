"""Forecast and size a training from config.json, without weights and without the Hub."""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ropepatch.attention import teaching_window
from ropepatch.attention.remapped import check_mappable
from ropepatch.data.positions import TrueLength
from ropepatch.errors import RopepatchError
from ropepatch.extension.planning import Plan
from ropepatch.files import read_json
from ropepatch.model.architectures import published
from ropepatch.model.checkpoint import TINY
from ropepatch.model.config import text_config
from ropepatch.model.cost import (
    CARDS,
    GIB,
    HOUR,
    Cost,
    forward_bytes,
    forward_operations,
    kind_of,
    step_bytes,
)
from ropepatch.model.precision import FLOAT32, best_device, fastest, memory_of
from ropepatch.settings import relative_length
from ropepatch.training.adapter import Weights
from ropepatch.training.recipe import Recipe, remapping_of

if TYPE_CHECKING:
    from ropepatch.model.checkpoint import Checkpoint, InMemory
    from ropepatch.model.config import Config
    from ropepatch.training.run import Run

SAVED = 12  # bytes per trained weight in a checkpoint of a run: float32, and two moments of Adam
GEOMETRY = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "vocab_size",
    "max_position_embeddings",
)
BETWEEN = (4, 2)  # multiples of L that are tried as lengths if the target is too long
SHARE = 3 / 4  # of the memory of a device
MOST_HOURS = 1.0
SMALL = 128  # the hidden size above which the learning rate falls as its inverse

FOUR_BITS = 0.516  # bytes per weight: NF4 in blocks of 64 with quantised scales (arXiv:2305.14314)


@dataclass(frozen=True)
class Forecast:
    """The forecast of a training."""

    recipe: Recipe
    cost: Cost | None  # None if the model cannot have the adapter
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        cost = {} if self.cost is None else self.cost.to_dict()
        return {
            "recipe": self.recipe.to_dict(),
            **cost,
            "warnings": list(self.warnings),
        }

    def __str__(self) -> str:
        lines = [f"warning: {warning}" for warning in self.warnings]
        if self.cost is not None:
            lines.insert(0, f"training: {self.cost}")
        return "\n".join(lines)


def forecast(run: Run) -> Forecast:
    """Forecast what a run does."""
    plan, recipe, device = run.plan, run.recipe, best_device()
    warnings = other_model(plan, recipe)
    try:
        counted = run.counted
    except RopepatchError:  # one of the checks of a dry run
        return Forecast(recipe, None, tuple(warnings))
    cost = training_cost(
        recipe,
        plan.config.whole,
        counted,
        dtype=recipe.precision or fastest(device).dtype,
        window=run.trained,
        target=plan.target,
        processes=run.processes.count,
        device=device,
    )
    available = memory_of(device)
    if cost.memory * GIB > available > 0:
        warnings.append(
            f"training needs about {cost.memory:.1f} GiB, {device} has {available / GIB:.1f}"
        )
    needed, free = _disk_needed(plan, recipe, counted), _disk_free(run.out)
    if needed > free:
        warnings.append(
            f"training needs {needed / GIB:.1f} GiB on the disk of {run.out}, {free / GIB:.1f} are free"
        )
    return Forecast(recipe, cost, tuple(warnings))


def training_cost(
    recipe: Recipe,
    config: Any,
    counted: Weights,
    *,
    dtype: str,
    window: int,
    target: int,
    processes: int = 1,
    device: str = "cuda",
) -> Cost:
    """Estimate the cost of a training, without its evaluations, in each of its processes.

    Args:
        recipe: The recipe.
        config: The config of the checkpoint.
        counted: The counts of its weights.
        dtype: The dtype of the computations.
        window: The original context length.
        target: The target length.
        processes: The number of processes.
        device: The type of device.
    """
    lengths, room = recipe.data.lengths(window)
    batches = processes * recipe.accumulated
    rows = Counter[int]()
    for step in range(recipe.max_steps):
        length = lengths[step % len(lengths)]
        rows[length] += batches * (room // length)
    # A sequence takes 3 forward passes with an adapter, 1 more with a teacher, or if all weights are trained.
    passes = 3 + (recipe.distil is not None) + (recipe.lora is None)
    text = text_config(config)
    operations = sum(
        count * forward_operations(text, counted.all, length)
        for length, count in rows.items()
    )
    kind = kind_of(device)
    return Cost(
        steps=recipe.max_steps,
        tokens=sum(length * count for length, count in rows.items()),
        memory=training_bytes(recipe, config, counted, dtype, window, target) / GIB,
        hours=passes * operations / processes / HOUR[kind],
        card=CARDS[kind],
    )


def training_bytes(
    recipe: Recipe, whole: Any, counted: Weights, dtype: str, window: int, target: int
) -> float:
    """Estimate the peak of the memory of a training in one process that holds all weights.

    Frozen weights take the bytes of the checkpoint's dtype in mixed precision, `FOUR_BITS` in 4 bits, else 4.
    Trained weights take 4, their gradients 4 and Adam's moments 8. Training all weights in mixed precision
    also keeps autocast's copies of 2 bytes. Gradients and moments also stay during an evaluation.
    """
    config, trained = text_config(whole), counted.trained
    size = 4 if dtype == FLOAT32 else 2
    if recipe.lora is None:
        held: float = counted.all * (4 if size == 4 else 6)
    else:
        is_cast = dtype == FLOAT32 or recipe.quantization is not None
        held = (
            counted.all * (size if is_cast else stored_dtype(whole).itemsize)
            + 4 * trained
        )
    if recipe.quantization:
        held -= counted.linear * (size - FOUR_BITS)
    lengths, room = recipe.data.lengths(window)
    # Embeddings in float32
    has_wide_stream = recipe.lora is None or recipe.lora.train_embeddings
    step = step_bytes(
        config,
        max(room // length * length for length in lengths),
        size,
        stream=4 if has_wide_stream else size,
        recomputed=recipe.gradient_checkpointing,
    )
    evaluated = target if recipe.watch.target else window
    has_passkeys = recipe.watch.target and recipe.watch.passkey_trials > 0
    evaluation = forward_bytes(config, evaluated, size, cached=has_passkeys)
    return held + 12 * trained + max(step, evaluation)


def stored_dtype(config: Any) -> torch.dtype:
    """Return the dtype of a checkpoint's weights as its config states it, else float32."""
    stated = config.dtype or text_config(config).dtype or FLOAT32
    dtype: torch.dtype = getattr(torch, str(stated).removeprefix("torch."))
    return dtype


@cache
def published_config(model: str) -> dict[str, Any] | None:
    """Return the config.json of a model that bundled recipes are for; None for others."""
    if model == "tiny":
        return read_json(TINY / "config.json")
    return published().get(model)


def other_model(plan: Plan, recipe: Recipe) -> list[str]:
    """Return a warning if the recipe is written for a model of another size."""
    meant = published_config(recipe.model) or {}
    sizes = [(meant.get(key), getattr(plan.config.text, key, None)) for key in GEOMETRY]
    if Path(plan.source.name).name == Path(recipe.model).name or all(
        one == other for one, other in sizes
    ):
        return []
    return [
        f"the recipe is for {recipe.model}, this model is {plan.source.name}: its learning rate, lengths "
        "and target were chosen for that model"
    ]


def _disk_needed(plan: Plan, recipe: Recipe, counted: Weights) -> int:
    """Return the bytes of the output and of the run's checkpoints, one of which is being written."""
    trained = counted.trained
    result = 4 * trained
    if recipe.save == "merged":
        result = counted.all * stored_dtype(plan.config.whole).itemsize
    checkpoints = recipe.trainer.get("save_total_limit", 2) + 1
    return result + checkpoints * SAVED * trained + 4 * trained


def _disk_free(out: Path) -> int:
    place = out.expanduser().absolute()
    there = next(folder for folder in (place, *place.parents) if folder.is_dir())
    return shutil.disk_usage(there).free


# Sizing


def sized(
    recipe: Recipe, source: Checkpoint | InMemory, target: int
) -> tuple[Recipe, str]:
    """Set the training sequences of a recipe as long as the device allows, and its learning rate.

    The device must have the memory and finish in about an hour. The lengths tried are the target, then 4 and
    2 times the original length at skipped positions, then the original length.

    Returns:
        The recipe, and a line with the length and the reason.
    """
    config, window = source.config, source.config.window
    model: Any = copy.deepcopy(config.skeleton)  # `Weights.of` adds an adapter
    recipe = _of_model(recipe, source.name, text_config(model.config).hidden_size)
    distances = {"name": "rerope", "window": teaching_window(window)}
    reason = ""  # for sequences shorter than the target
    lengths = [target]
    lengths += [times * window for times in BETWEEN if times * window < target]
    try:
        check_mappable(model, window)
        remapping_of(distances).fitted(window, target)
    except RopepatchError as error:
        reason = f": the base model does not support position remapping ({error})"
        lengths = []
    counted = Weights.of(model, recipe.lora) if lengths else Weights.before(model)
    for length, recomputed in product(lengths, (False, True)):
        longer = _longer(recipe, length, target, window, distances)
        longer = longer.model_copy(update={"gradient_checkpointing": recomputed})
        too_long = _too_long(longer, config, counted, target)
        if too_long is None:
            where = "at skipped positions"
            if length == target:
                where = "(the target length)"
            return longer, f"training on sequences of {length:,} tokens {where}{reason}"
        if length == target:
            reason = f": {length:,} tokens {too_long}"
    length = min(window, relative_length(recipe.data.tokens_per_batch, window))
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
