"""Forecast and size a training from config.json, without weights and without the Hub."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ropepatch.attention import teaching_window
from ropepatch.data.positions import TrueLength
from ropepatch.extension.planning import Plan
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
from ropepatch.training.recipe import Recipe

BETWEEN = (4, 2)  # multiples of L that are tried as lengths if the target is too long
SHARE = 3 / 4  # of the memory of a device
KEPT = 1 / 4  # of it, up to which activations are kept instead of recomputed
MOST_HOURS = 1.0
# Hidden sizes, of tiny and of SmolLM2, between which the learning rate falls, and the exponent: 4e-3 was good
# at the first, 1.1e-4 at the second (eval/studies/distil)
SMALL, LARGE = 128, 576
FALL = 2.39

FOUR_BITS = 0.516  # bytes per weight: NF4 in blocks of 64 with quantised scales (arXiv:2305.14314)


@dataclass(frozen=True)
class Forecast:
    """The recipe of a training, and its cost on this machine."""

    recipe: Recipe
    cost: Cost

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return {"recipe": self.recipe.to_dict(), **asdict(self.cost)}

    def __str__(self) -> str:
        return f"training: {self.cost}"


def forecast(
    recipe: Recipe, plan: Plan, counted: Weights, processes: int = 1
) -> Forecast:
    """Forecast a training on this machine."""
    device = best_device()
    cost = training_cost(
        recipe,
        plan.config.whole,
        counted,
        dtype=recipe.precision or fastest(device),
        window=plan.config.window,
        target=plan.target,
        processes=processes,
        device=device,
    )
    return Forecast(recipe, cost)


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
    memory, host = training_bytes(recipe, config, counted, dtype, window, target)
    return Cost(
        steps=recipe.max_steps,
        tokens=sum(length * count for length, count in rows.items()),
        memory=memory / GIB,
        host=host / GIB,
        hours=passes * operations / processes / HOUR[kind],
        card=CARDS[kind],
    )


def training_bytes(
    recipe: Recipe, whole: Any, counted: Weights, dtype: str, window: int, target: int
) -> tuple[float, int]:
    """Estimate the peak of the memory of a training in one process that holds all weights, and of its host's.

    Frozen weights take the bytes of the checkpoint's dtype in mixed precision, `FOUR_BITS` in 4 bits, else 4.
    Trained weights take 4, their gradients 4 and Adam's moments 8. Training all weights in mixed precision
    also keeps autocast's copies of 2 bytes. Gradients and moments also stay during an evaluation.
    """
    config = text_config(whole)
    size = 4 if dtype == FLOAT32 else 2
    stored: Any = whole.dtype or config.dtype or FLOAT32
    frozen = getattr(torch, str(stored).removeprefix("torch.")).itemsize
    if dtype == FLOAT32 or recipe.quantization:
        frozen = size
    if recipe.lora is None:
        held: float = counted.all * (4 if size == 4 else 6)
    else:
        held = counted.all * frozen + 4 * counted.trained
    if recipe.quantization:
        held -= counted.linear * (size - FOUR_BITS)
    lengths, room = recipe.data.lengths(window)
    # Embeddings in float32
    has_wide_stream = recipe.lora is None or recipe.lora.train_embeddings
    stream, host = 4 if has_wide_stream else size, 0
    tokens = max(room // length * length for length in lengths)
    if recipe.gradient_checkpointing == "offload":
        host = stream * tokens * config.hidden_size * config.num_hidden_layers
        stream = 0
    recomputed = bool(recipe.gradient_checkpointing)
    step = step_bytes(config, tokens, size, stream=stream, recomputed=recomputed)
    evaluated = target if recipe.watch.target else window
    has_passkeys = recipe.watch.target and recipe.watch.passkey_trials > 0
    evaluation = forward_bytes(config, evaluated, size, cached=has_passkeys)
    return held + 12 * counted.trained + max(step, evaluation), host


def sized(recipe: Recipe, plan: Plan) -> tuple[Recipe, str]:
    """Set the learning rate of a recipe for a model, and its sequences as long as the device allows.

    The device must have the memory and finish in about an hour. The lengths tried are the target, then 4 and
    2 times the original length at skipped positions, then the original length. If activations take little of
    the memory, they are kept and not recomputed, which saves time and changes no weight.

    Returns:
        The recipe, and a line with the length and the reason.
    """
    assert recipe.distil is not None
    config, target = plan.config, plan.target
    window = config.window
    hidden = min(max(config.text.hidden_size, SMALL), LARGE)
    rate = recipe.trainer["learning_rate"] * (LARGE / hidden) ** FALL
    distil = recipe.distil.model_copy(update={"auto_size": False})
    recipe = recipe.model_copy(
        update={
            "model": plan.source.name,
            "trainer": recipe.trainer | {"learning_rate": float(f"{rate:.2g}")},
            "distil": distil,
        }
    )
    room = relative_length(recipe.data.tokens_per_batch, window)
    memory = memory_of(best_device()) / GIB
    reason = ""  # for sequences shorter than the target
    lengths = [target]
    lengths += [times * window for times in BETWEEN if times * window < target]
    counted = Weights.of(config.skeleton, recipe.lora)
    for length in lengths:
        remapping = {"name": "rerope", "window": teaching_window(window)}
        longer = {
            "windows": (length,),
            "tokens_per_batch": max(length, room),
            "boundaries": False,
        }
        changes: dict[str, Any] = {
            "data": recipe.data.model_copy(update=longer),
            "distil": distil.model_copy(update={"remapping": remapping}),
        }
        if length == target:
            changes["positions"] = TrueLength()
        made = recipe.model_copy(update=changes)
        cost = forecast(made, plan, counted).cost
        if cost.memory <= SHARE * memory and cost.hours <= MOST_HOURS:
            break
        reason = reason or (
            f": {length:,} tokens take {cost.memory:.2g} GiB of {SHARE * memory:.2g}, "
            f"and {cost.hours:.1f} h on {cost.card}"
        )
    else:
        length = min(window, room)
        data = recipe.data.model_copy(update={"windows": (length,)})
        made = recipe.model_copy(update={"data": data})
    kept = made.model_copy(update={"gradient_checkpointing": False})
    if forecast(kept, plan, counted).cost.memory <= KEPT * memory:
        made = kept
    where = "(the target length)" if length == target else "at skipped positions"
    return made, f"training on sequences of {length:,} tokens {where}{reason}"
