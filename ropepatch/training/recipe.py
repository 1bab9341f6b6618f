"""A recipe: what a model is trained on, and how, to read at a longer context; from strict YAML."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ropepatch.data.texts import Texts, check, check_length, is_text
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.suites import Method, read_method
from ropepatch.files import shipped
from ropepatch.scaling.file import FIT
from ropepatch.settings import (
    Length,
    check_keys,
    is_amount,
    is_count,
    read_yaml,
    refuse_unknown,
)
from ropepatch.training.positions import PositionSampling, read_positions
from ropepatch.training.sections import (
    Data,
    Fit,
    Frequencies,
    Generated,
    Lora,
    Watch,
)

ATTENTIONS = ("sdpa", "flash_attention_2", "flash_attention_3")
OURS = {  # arguments of the Trainer that follow from other parts of a recipe, or that would break a resume
    "output_dir",
    "seed",
    "data_seed",
    "eval_strategy",
    "eval_steps",
    "do_train",
    "do_eval",
    "do_predict",
    "num_train_epochs",
    "gradient_checkpointing",  # a key of the recipe
    "gradient_checkpointing_kwargs",
    "activation_checkpointing",
    "activation_checkpointing_kwargs",
    "eval_on_start",
    "logging_nan_inf_filter",
    "label_smoothing_factor",
    "ignore_data_skip",
    "use_cache",
    "train_sampling_strategy",
    "length_column_name",
    "dataloader_drop_last",
    "metric_for_best_model",
    "greater_is_better",
    "use_liger_kernel",  # the loss finds it by itself
    "parallelism_config",  # these are the launcher's: recipes/accelerate
    "fsdp",
    "fsdp_config",
    "deepspeed",
    "hub_model_id",
    "hub_strategy",
    "hub_token",
    "hub_private_repo",
    "hub_always_push",
    "hub_revision",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "remove_unused_columns",
    "resume_from_checkpoint",
    "save_strategy",
    "save_only_model",
    "load_best_model_at_end",
    "push_to_hub",
    "disable_tqdm",
    "use_cpu",
    "average_tokens_across_devices",
    "auto_find_batch_size",
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is adapted to a longer context.

    Args:
        model: The checkpoint it is written for; the command line may name another.
        to: The target context.
        method: The scaling; `fit` learns it first, with the weights frozen.
        data: What is read.
        positions: Where the tokens of a row are said to stand.
        lora: The adapter; None to train all weights.
        frequencies: Train the frequencies, too, from those of the method on; None to leave them.
        trainer: Arguments of transformers' Trainer, as `TrainingArguments` names them; `max_steps` and
            `learning_rate` must be among them.
        watch: What is measured meanwhile.
        gradient_checkpointing: Compute activations again in the backward pass instead of keeping them.
        attention: The kernel: sdpa, flash_attention_2 or flash_attention_3.
        save: `merged`, a checkpoint that needs nothing else, or the `adapter` alone.
        seed: Of the adapter's weights, the order of the data and the positions.

    Raises:
        RopepatchError: One of these is not what it must be.
    """

    model: str
    to: Length
    method: Method = field(default_factory=lambda: Method(name="yarn"))
    data: Data
    positions: PositionSampling
    lora: Lora | None
    trainer: Mapping[str, Any]
    frequencies: Frequencies | None = None
    watch: Watch = field(default_factory=Watch)
    gradient_checkpointing: bool = False
    attention: str = "sdpa"
    save: str = "merged"
    seed: int = 0

    def __post_init__(self) -> None:
        check("model", self.model, is_text(self.model), "a checkpoint folder or a Hub id")
        check_length("to", self.to)
        is_switch = isinstance(self.gradient_checkpointing, bool)
        check("gradient_checkpointing", self.gradient_checkpointing, is_switch, "true or false")
        refuse_unknown([self.attention], ATTENTIONS, "attention")
        refuse_unknown([self.save], ("merged", "adapter"), "save")
        check(
            "seed",
            self.seed,
            type(self.seed) is int and 0 <= self.seed < 2**32,
            "a whole number from 0 to 2**32 - 1",
        )
        if self.lora is None and self.save == "adapter":
            raise RopepatchError("save: adapter, but all weights are trained (lora is null)")
        _check_trainer(self.trainer)
        if self.lora and self.lora.loraplus_lr_ratio and "optim" in self.trainer:
            raise RopepatchError("trainer.optim beside lora.loraplus_lr_ratio, which has its own: AdamW")

    @property
    def max_steps(self) -> int:
        """Optimiser steps."""
        steps: int = self.trainer["max_steps"]
        return steps

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data that decides what comes out."""
        content = asdict(self) | {"method": {"name": self.method.name} | self.method.parameters}
        return content | {"positions": self.positions.to_dict()}


def recipe_file(name: str) -> Path:
    """The file of a recipe that comes with ropepatch, by its name, or a YAML file by its path.

    Raises:
        RopepatchError: No recipe of that name.
    """
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    refuse_unknown([name], recipe_names(), "recipe")
    return shipped("recipes") / f"{name}.yaml"


def recipe_names() -> list[str]:
    """The recipes that come with ropepatch."""
    return sorted(file.stem for file in shipped("recipes").glob("*.yaml"))


def read_recipe(name: str) -> Recipe:
    """A recipe that comes with ropepatch, by its name, or that of a YAML file.

    Raises:
        RopepatchError: No such recipe, no YAML, a key missing, or one unknown or of the wrong kind.
    """
    file = recipe_file(name)
    content = read_yaml(file, "recipe")
    try:
        check_keys(Recipe, content)
        made: dict[str, Any] = {
            key: READERS[key](value) if key in READERS else value for key, value in content.items()
        }
        return Recipe(**made)
    except RopepatchError as error:
        raise RopepatchError(f"{file}: {error}", hint=error.hint) from error


def _data(content: Any) -> Data:
    check_keys(Data, content)
    sources = _list("sources", content["sources"])
    windows = content["windows"]
    return Data(
        **content
        | {
            "sources": tuple(map(_source, sources)),
            "windows": tuple(windows) if isinstance(windows, list) else (windows,),
        }
    )


def _source(content: Any) -> Texts | Generated:
    kind: Any = Generated if isinstance(content, dict) and "generated" in content else Texts
    check_keys(kind, content)
    source: Texts | Generated = kind(**content)
    return source


def _lora(content: Any) -> Lora | None:
    if content is None:
        return None
    check_keys(Lora, content)
    values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in content.items()}
    return Lora(**values)


def _method(content: Any) -> Method:
    if not isinstance(content, dict) or content.get("name") != FIT:
        return Method(name=FIT) if content == FIT else read_method(content)
    parameters = {key: value for key, value in content.items() if key != "name"}
    check_keys(Fit, parameters)
    Fit(**parameters)
    return Method(name=FIT, parameters=parameters)


def _frequencies(content: Any) -> Frequencies | None:
    if content is None:
        return None
    check_keys(Frequencies, content)
    return Frequencies(**content)


def _watch(content: Any) -> Watch:
    check_keys(Watch, content)
    return Watch(**content)


READERS: dict[str, Callable[[Any], Any]] = {
    "method": _method,
    "data": _data,
    "positions": read_positions,
    "lora": _lora,
    "frequencies": _frequencies,
    "watch": _watch,
}


def _list(key: str, value: Any) -> list[Any]:
    check(key, value, isinstance(value, list), "a list")
    values: list[Any] = value
    return values


def _check_trainer(arguments: Mapping[str, Any]) -> None:
    from transformers import TrainingArguments

    check("trainer", arguments, isinstance(arguments, dict), "a mapping")
    if ours := sorted(OURS & arguments.keys()):
        raise RopepatchError(
            f"trainer.{ours[0]} is not for a recipe to set", hint="ropepatch sets it, or another key does"
        )
    known = [argument.name for argument in fields(TrainingArguments) if argument.init]
    refuse_unknown(arguments, [name for name in known if name not in OURS], "trainer key")
    steps, rate = arguments.get("max_steps"), arguments.get("learning_rate")
    check("trainer.max_steps", steps, is_count(steps), "a whole number above 0")
    limit = arguments.get("save_total_limit", 2)
    check("trainer.save_total_limit", limit, is_count(limit) and limit > 1, "2 or more: one may be damaged")
    if arguments.get("lr_scheduler_type") in ("reduce_lr_on_plateau", "greedy"):
        raise RopepatchError("trainer.lr_scheduler_type must not wait for a measurement", hint="cosine, say")
    accumulated = arguments.get("gradient_accumulation_steps", 1)
    check("trainer.gradient_accumulation_steps", accumulated, is_count(accumulated), "a whole number above 0")
    for key in ("bf16", "fp16"):
        switch = arguments.get(key, False)
        check(f"trainer.{key}", switch, isinstance(switch, bool), "true or false")
    check("trainer.learning_rate", rate, is_amount(rate), "a number above 0 (with a point: 2.0e-5)")
    for argument in fields(TrainingArguments):
        value = arguments.get(argument.name)
        if re.search(r"\b(float|int)\b", str(argument.type)) and "str" not in str(argument.type):
            is_number = isinstance(value, int | float | None) and not isinstance(value, bool)
            check(f"trainer.{argument.name}", value, is_number, "a number (with a point: 1.0e-3)")
        elif not isinstance(value, bool | int | float | str | list | dict | None):
            check(f"trainer.{argument.name}", value, False, "a number, a text, a list or a mapping")
