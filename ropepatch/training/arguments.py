"""The arguments of transformers' Trainer, from a recipe and the environment of accelerate's launcher."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ropepatch.errors import RopepatchError, is_out_of_memory
from ropepatch.files import shipped
from ropepatch.processes import on_cpu
from ropepatch.training.recipe import Recipe

if TYPE_CHECKING:
    from transformers import TrainingArguments

FSDP, DEEPSPEED = "FSDP", "DEEPSPEED"
NEEDS_ALL_WEIGHTS = {
    "distil": "self-distillation is not possible",
    "quantization": "4-bit weights are not possible",
}


def engine() -> str | None:
    """Return the engine by which accelerate's launcher splits the weights over processes, if any."""
    for name in (FSDP, DEEPSPEED):
        if os.environ.get(f"ACCELERATE_USE_{name}") == "true":
            return name
    return None


def check_launcher(recipe: Recipe) -> None:
    """Raise `RopepatchError` if the processes of this launcher cannot share the training of a recipe."""
    place = shipped("recipes/accelerate")
    for size in ("CP_SIZE", "SP_SIZE"):
        if os.environ.get(f"PARALLELISM_CONFIG_{size}", "1") != "1":
            raise RopepatchError(
                "a recipe's packed sequences cannot be split over processes by accelerate",
                hint=f"{place}/fsdp2.yaml; or train what `extend` writes with a trainer of your own",
            )
    for section, reason in NEEDS_ALL_WEIGHTS.items():
        if getattr(recipe, section) and engine():
            raise RopepatchError(
                f"{reason} if FSDP or DeepSpeed splits the model",
                hint=f"DDP takes them: {place}/ddp.yaml; or leave {section} out",
            )
    if engine() == DEEPSPEED and find_spec("deepspeed") is None:
        raise RopepatchError("DeepSpeed is not installed", hint="pip install deepspeed")


@contextmanager
def announced(recipe: Recipe) -> Iterator[None]:
    """Tell DeepSpeed the recipe's accumulation and clipping within the block, by the launcher's variables."""
    values: dict[str, str] = {}
    if engine() == DEEPSPEED:
        values["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(recipe.accumulated)
        values["ACCELERATE_GRADIENT_CLIPPING"] = str(_clipping(recipe))
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def split_models(arguments: TrainingArguments) -> Iterator[None]:
    """Let DeepSpeed's ZeRO-3 split models that transformers loads within the block."""
    plugin = arguments.deepspeed_plugin
    if plugin is not None:
        plugin.set_deepspeed_weakref()
    yield
    load_whole_models()


def load_whole_models() -> None:
    """Let transformers load whole models; under ZeRO-3 it would split each over the processes."""
    if engine() == DEEPSPEED:
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]


def checked_arguments(recipe: Recipe, folder: Path, dtype: str) -> TrainingArguments:
    """Make the Trainer's arguments of a run in a folder.

    Raises `RopepatchError` if transformers has no such arguments, trackers, optimiser or schedule.
    """
    from transformers import Trainer, TrainingArguments, get_scheduler
    from transformers.integrations import integration_utils

    try:
        arguments = TrainingArguments(**_values(recipe, folder, dtype))
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
    load_whole_models()
    if arguments.n_gpu > 1:  # without a launcher: one GPU instead of nn.DataParallel
        arguments._n_gpu = 1
    return arguments


def _values(recipe: Recipe, folder: Path, dtype: str) -> dict[str, Any]:
    """Return the recipe's trainer section with our defaults, and what only ropepatch sets."""
    defaults = {
        "report_to": "none",
        "logging_steps": 10,
        "save_steps": 100,
        "save_total_limit": 2,
    }
    ours = {
        "output_dir": str(folder),
        "seed": recipe.seed,
        "data_seed": recipe.seed,
        "eval_strategy": "steps",
        "eval_steps": recipe.watch.every,
        "per_device_train_batch_size": 1,  # an item of `Batches` is one forward pass
        "remove_unused_columns": False,
        "save_strategy": "steps",
        "disable_tqdm": True,
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "average_tokens_across_devices": True,
        "logging_nan_inf_filter": False,  # `log` raises on a loss that is not finite
    }
    if engine() != DEEPSPEED:
        ours["use_cpu"] = on_cpu()
    else:  # which would not start with `use_cpu`, and compares the clipping with its settings
        ours["max_grad_norm"] = _clipping(recipe)
        if not torch.cuda.is_available():
            ours["ddp_backend"] = "gloo"
    return defaults | recipe.trainer | ours


def _clipping(recipe: Recipe) -> float:
    """Return the largest norm of gradients; accelerate would treat 0, for none, as 1."""
    norm: Any = recipe.trainer.get("max_grad_norm", 1.0)
    return float(norm) or 1e9
