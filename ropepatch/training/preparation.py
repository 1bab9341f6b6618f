"""Whether a recipe can train a model here: what is checked before a weight is loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from ropepatch.attention.remapped import check_mappable
from ropepatch.errors import RopepatchError
from ropepatch.extension.planning import Plan
from ropepatch.model.config import stock_code
from ropepatch.training.arguments import check_launcher
from ropepatch.training.packed_attention import packed_attention
from ropepatch.training.recipe import Recipe, refuse_map, remapping_of
from ropepatch.training.run import Run


def checks(run: Run) -> list[Callable[[], object]]:
    """Return the checks of a run, which raise `RopepatchError`; a dry run collects their errors."""
    return [
        partial(_check_4_bits, run.recipe),
        partial(check_trainable, run.plan, run.recipe),
        partial(check_launcher, run.recipe),
        partial(_check_attention, run.plan, run.recipe),
        lambda: run.arguments,
        lambda: run.counted,
    ]


def check_trainable(plan: Plan, recipe: Recipe) -> None:
    """Raise `RopepatchError` if a model with this plan cannot be trained with this recipe."""
    refuse_map(plan.method.name)
    if plan.length_dependent and not plan.method.length_dependent:
        raise RopepatchError(
            f"{plan.source.name} follows the length: there are no fixed frequencies to train for",
            hint="give config.json one list for all lengths, its long_factor for short_factor, too",
        )
    if plan.length_dependent:
        raise RopepatchError(
            f"{plan.method.name} follows the length: there are no fixed frequencies to train for",
            hint="train with a static method",
        )
    if plan.config.is_quantised:
        raise RopepatchError(
            f"the weights of {plan.source.name} are quantised",
            hint="train the checkpoint it was made from",
        )
    window = plan.config.rope.original_max_position_embeddings
    longest = max(recipe.data.lengths(window)[0])
    if longest > plan.target:
        raise RopepatchError(
            f"data.windows contains {longest} tokens, more than the target length of {plan.target}",
            hint="lower data.windows, or raise the target length",
        )
    if recipe.distil and recipe.reads_beyond(window):
        check_mappable(plan.config.skeleton, window)
        remapping_of(recipe.distil.remapping).fitted(window, plan.target)


def _check_attention(plan: Plan, recipe: Recipe) -> None:
    model: Any = copy.deepcopy(plan.config.skeleton)
    if recipe.packed_by_us:
        with packed_attention(model):
            return
    with stock_code(
        f"use {recipe.attention}", "attention: sdpa needs no further package"
    ):
        model.set_attn_implementation(recipe.attention)


def _check_4_bits(recipe: Recipe) -> None:
    if recipe.quantization is None:
        return
    if not torch.cuda.is_available():
        raise RopepatchError(
            "quantization: 4bit needs a CUDA GPU, and none was found",
            hint="drop quantization",
        )
    if find_spec("bitsandbytes") is None:
        raise RopepatchError(
            "quantization: 4bit needs bitsandbytes", hint="pip install bitsandbytes"
        )
