"""The arguments of transformers' Trainer, from a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.integrations import integration_utils

from ropepatch.errors import RopepatchError, is_out_of_memory
from ropepatch.training.parallel import launch_arguments
from ropepatch.training.recipe import Recipe


def check_trainer_section(recipe: Recipe, dtype: str) -> None:
    """Raise `RopepatchError` if transformers has no such arguments, trackers, optimiser or schedule."""
    try:
        arguments = training_arguments(recipe, Path("run"), dtype=dtype, resumed=False)
        for tracker in integration_utils.get_reporting_integration_callbacks(
            arguments.report_to
        ):  # type: ignore[no-untyped-call]
            tracker()
        Trainer.get_optimizer_cls_and_kwargs(arguments)
        get_scheduler(
            arguments.lr_scheduler_type,
            torch.optim.SGD([torch.zeros(1, requires_grad=True)]),
            num_warmup_steps=arguments.get_warmup_steps(recipe.max_steps),
            num_training_steps=recipe.max_steps,
            scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,  # type: ignore[arg-type]
        )
    except (TypeError, ValueError, ImportError, RuntimeError, KeyError) as error:
        if is_out_of_memory(error):
            raise
        raise RopepatchError(
            f"transformers rejects the recipe's trainer section: {' '.join(str(error).split())[:300]}",
            hint="fix the trainer section of the recipe",
        ) from error


def training_arguments(
    recipe: Recipe, folder: Path, *, dtype: str, resumed: bool
) -> TrainingArguments:
    """Build the Trainer's arguments of a run in a folder."""
    ours = {
        "output_dir": str(folder),
        "seed": recipe.seed,
        "data_seed": recipe.seed,
        "eval_strategy": "steps",
        "eval_steps": recipe.watch.every,
        "eval_on_start": not resumed,
        "per_device_train_batch_size": 1,  # an item of `Batches` is one forward pass
        "remove_unused_columns": False,
        "save_strategy": "steps",
        "disable_tqdm": True,
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "average_tokens_across_devices": True,
        "logging_nan_inf_filter": False,  # `log` raises on a loss that is not finite
    }
    defaults = {
        "report_to": "none",
        "logging_steps": 10,
        "save_steps": 100,
        "save_total_limit": 2,
    }
    values: dict[str, Any] = {
        **defaults,
        **recipe.trainer,
        **ours,
        **launch_arguments(recipe),
    }
    arguments = TrainingArguments(**values)
    if (
        arguments.n_gpu > 1
    ):  # without torchrun or accelerate: one GPU instead of nn.DataParallel
        arguments._n_gpu = 1
    return arguments
