"""Check whether a recipe can train a model here: packages, arguments and adapter."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from ropepatch.attention.remapped import check_mappable
from ropepatch.errors import RopepatchError
from ropepatch.extension.planning import Plan
from ropepatch.model.config import stock_code
from ropepatch.model.precision import Precision, fastest
from ropepatch.training.adapter import trainable
from ropepatch.training.packed_attention import packed_attention
from ropepatch.training.parallel import Sharing
from ropepatch.training.recipe import Recipe, refuse_map, remapping_of


@dataclass(frozen=True)
class Weights:
    """Counts of the weights of a model."""

    all: int
    linear: int  # in linear layers but the head, which can be kept in 4 bits
    trained: int | None  # with those of the adapter; None if the model cannot have it

    @classmethod
    def of(cls, model: Any, recipe: Recipe) -> Weights:
        """Count after adding the adapter of the recipe to a model, which may be on the meta device."""
        counted = cls.before(model)
        with torch.random.fork_rng(
            devices=[]
        ):  # PEFT initialises the adapter at random
            trained = list(trainable(model, recipe.lora).parameters())
        return replace(
            counted,
            trained=sum(
                weights.numel() for weights in trained if weights.requires_grad
            ),
        )

    @classmethod
    def before(cls, model: Any) -> Weights:
        """Count the weights of a model without an adapter."""
        head = model.get_output_embeddings()
        linear = [
            part
            for part in model.modules()
            if isinstance(part, nn.Linear) and part is not head
        ]
        total = sum(weights.numel() for weights in model.parameters())
        return cls(total, sum(part.weight.numel() for part in linear), None)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A recipe checked against the model of a plan, before any weight is loaded."""

    counted: Weights
    sharing: Sharing
    precision: Precision  # from the recipe, or else from the hardware
    obstacles: tuple[RopepatchError, ...]  # why it cannot run here

    def check(self) -> None:
        """Raise the first obstacle."""
        for obstacle in self.obstacles:
            raise obstacle


def prepare(plan: Plan, recipe: Recipe) -> Prepared:
    """Check the trainer section, build the adapter on the meta device, and collect the errors.

    A dry run prints these obstacles, a training raises the first.
    """
    obstacles = list(_missing_packages(recipe))
    can_train = not obstacles

    @contextmanager
    def noted() -> Iterator[None]:
        try:
            yield
        except RopepatchError as error:
            obstacles.append(error)

    model: Any = copy.deepcopy(plan.config.skeleton)
    counted, sharing = Weights.before(model), Sharing.of_environment()
    precision = fastest() if recipe.precision is None else Precision(recipe.precision)
    with noted():
        check_trainable(plan, recipe, model)
        sharing.check(recipe)
        _check_attention(recipe, model)
        if can_train:
            from ropepatch.training.arguments import check_trainer_section

            with sharing.announced(recipe):
                check_trainer_section(recipe, precision.dtype)
    with noted():
        counted = Weights.of(model, recipe)
    return Prepared(counted, sharing, precision, tuple(obstacles))


def check_trainable(plan: Plan, recipe: Recipe, model: Any) -> None:
    """Raise `RopepatchError` if a model with this plan cannot be trained with this recipe."""
    refuse_map(plan.method.name)
    if plan.length_dependent:
        switched = not plan.method.length_dependent
        raise RopepatchError(
            f"{plan.source.name if switched else plan.method.name} follows the length: there are no fixed "
            "frequencies to train for",
            hint="give config.json one list for all lengths, its long_factor for short_factor, too"
            if switched
            else "train with a static method",
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
        check_mappable(model, window)
        remapping_of(recipe.distil.remapping).fitted(window, plan.target)


def _check_attention(recipe: Recipe, model: Any) -> None:
    if recipe.packed_by_us:
        with packed_attention(model):
            pass
    else:
        with stock_code(
            f"use {recipe.attention}", "attention: sdpa needs no further package"
        ):
            model.set_attn_implementation(recipe.attention)


def _missing_packages(recipe: Recipe) -> Iterator[RopepatchError]:
    if recipe.quantization and not torch.cuda.is_available():
        yield RopepatchError(
            "quantization: 4bit needs a CUDA GPU, and none was found",
            hint="drop quantization",
        )
    if recipe.quantization and find_spec("bitsandbytes") is None:
        yield RopepatchError(
            "quantization: 4bit needs bitsandbytes", hint="pip install bitsandbytes"
        )
