"""A recipe: what a model is trained on, and how, to read at a longer context; from strict YAML."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, Required

from pydantic import BeforeValidator, ConfigDict, Field, WrapValidator, with_config
from typing_extensions import TypedDict

from ropepatch.attention import MAPS
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.suites import Method, WrittenScaling, read_method
from ropepatch.scaling.file import FIT
from ropepatch.settings import Amount, Count, Length, Settings, expected, refuse_unknown, shown
from ropepatch.settings.shipped import RECIPES, find_shipped
from ropepatch.training.positions import Positions
from ropepatch.training.recipe_sections import (
    SELF,
    Data,
    Distil,
    Fit,
    FrequencyTraining,
    Generated,
    Lora,
    Parallel,
    Watch,
)

# Arguments of the Trainer that are not a recipe's to set: it has keys for them, they are the launcher's (see
# recipes/accelerate), or they would break a resume.
OURS = {
    *("output_dir", "seed", "data_seed", "do_train", "do_eval", "do_predict", "num_train_epochs"),
    *("eval_strategy", "eval_steps", "eval_on_start", "per_device_eval_batch_size"),
    *("disable_tqdm", "use_cpu"),
    *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
    *("activation_checkpointing", "activation_checkpointing_kwargs"),
    *("per_device_train_batch_size", "remove_unused_columns", "average_tokens_across_devices"),
    *("train_sampling_strategy", "length_column_name", "dataloader_drop_last", "auto_find_batch_size"),
    *("label_smoothing_factor", "logging_nan_inf_filter", "use_cache"),
    "use_liger_kernel",  # the loss finds it by itself
    *("parallelism_config", "fsdp", "fsdp_config", "deepspeed"),
    *("ignore_data_skip", "resume_from_checkpoint", "save_strategy", "save_only_model"),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    *("push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push"),
    "hub_revision",
}


@with_config(ConfigDict(extra="allow", strict=True))
class TrainerArguments(TypedDict, total=False):
    """Arguments of transformers' Trainer that ropepatch reads itself; `check_trainer` sees to the others."""

    max_steps: Required[Count]
    learning_rate: Required[Amount]
    gradient_accumulation_steps: Count
    save_total_limit: Annotated[int, Field(ge=2), expected("2 or more: one may be damaged")]
    bf16: bool
    fp16: bool


def _method(content: Any) -> Method:
    if isinstance(content, Method):
        return content
    parameters = dict(content) if isinstance(content, dict) else {"name": content}
    if parameters.pop("name", None) != FIT:
        method = read_method(content)
        refuse_map(method.name)
        return method
    Fit.model_validate(parameters)
    return Method(name=FIT, parameters=parameters)


class Recipe(Settings):
    """How a model is adapted to a longer context.

    Args:
        model: The checkpoint it is written for; the command line may name another.
        to: The target context.
        method: The scaling; `fit` learns it first, with the weights frozen.
        data: What is read.
        positions: Where the tokens of a row are said to stand.
        lora: The adapter; None to train all weights.
        distil: Teach it by what the base model expects, in place of the text's tokens; None for the tokens.
        frequencies: Train the frequencies, too, from those of the method on; None to leave them.
        trainer: Arguments of transformers' Trainer, as `TrainingArguments` names them; `max_steps` and
            `learning_rate` must be among them. Without `bf16` and `fp16` the precision follows from
            the hardware: bfloat16 where it has units for it (CUDA 8.0, AMX, AVX512_BF16), else float32.
        parallel: How processes share a row; None for rows of their own.
        watch: What is measured meanwhile.
        gradient_checkpointing: Compute activations again in the backward pass instead of keeping them.
        quantization: `4bit` keeps the frozen weights in 4 bits (QLoRA, arXiv:2305.14314), by bitsandbytes on
            a CUDA GPU; the adapter is merged into the unquantised weights. None for their own precision.
        attention: The kernel: sdpa, flash_attention_2 or flash_attention_3.
        save: `merged`, a checkpoint that needs nothing else, or the `adapter` alone.
        seed: The seed of the adapter's weights, of the order of the data and of the positions.
    """

    model: Annotated[str, Field(min_length=1), expected("a checkpoint folder or a Hub id")]
    to: Length
    method: Annotated[
        Method, BeforeValidator(_method, json_schema_input_type=WrittenScaling | Literal["fit"])
    ] = Field(default_factory=lambda: Method(name="yarn"))
    data: Data
    positions: Positions
    lora: Lora | None
    trainer: Annotated[TrainerArguments, WrapValidator(lambda content, fits: fits(content) and content)]
    distil: Distil | None = None
    frequencies: FrequencyTraining | None = None
    parallel: Parallel | None = None
    watch: Watch = Watch()
    gradient_checkpointing: bool = False
    quantization: Literal["4bit"] | None = None
    attention: Literal["sdpa", "flash_attention_2", "flash_attention_3"] = "sdpa"
    save: Literal["merged", "adapter"] = "merged"
    seed: Annotated[int, Field(ge=0, lt=2**32), expected("a whole number from 0 to 2**32 - 1")] = 0

    def check(self) -> None:
        """Refuse what does not fit together, and arguments of the Trainer that are not a recipe's to set."""
        if self.lora is None and self.save == "adapter":
            raise RopepatchError("save: adapter, but all weights are trained (lora is null)")
        if self.lora is None and self.distil is not None:
            raise RopepatchError(
                "distil beside lora: null: the teacher is the base model, whose weights would be trained",
                hint="train an adapter, which is taken off while the teacher reads",
            )
        if self.lora is None and self.quantization:
            raise RopepatchError(
                "quantization: 4bit beside lora: null: weights in 4 bits are not trained",
                hint="train an adapter, or leave quantization out",
            )
        only_self = all(isinstance(one, Generated) and one.generated == SELF for one in self.data.sources)
        if only_self and self.data.boundaries and self.positions.name == "true-length":
            raise RopepatchError(
                "generated: self makes documents within the old context, which, apart and at true positions, "
                "teach nothing beyond it",
                hint="data.boundaries: false joins them; or positions: pose",
            )
        check_trainer(self.trainer)
        if self.trainer.get("bf16") and self.trainer.get("fp16"):
            raise RopepatchError("trainer.bf16 beside fp16", hint="set one of them")
        if self.lora and self.lora.loraplus_lr_ratio and "optim" in self.trainer:
            raise RopepatchError("trainer.optim beside lora.loraplus_lr_ratio, which has its own: AdamW")

    @property
    def max_steps(self) -> int:
        """Optimiser steps."""
        return self.trainer["max_steps"]

    def reads_beyond(self, trained: int) -> bool:
        """Whether some of its rows are longer than an old context of ``trained`` tokens."""
        return max(self.data.lengths(trained)[0]) > trained

    @property
    def precision(self) -> str | None:
        """What `bf16` or `fp16` in `trainer` states; None where neither does: what is fastest is taken."""
        if self.trainer.get("fp16"):
            return "float16"
        if self.trainer.get("bf16"):
            return "bfloat16"
        return "float32" if {"bf16", "fp16"} & self.trainer.keys() else None

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data that decides what comes out."""
        return self.model_dump() | {"method": {"name": self.method.name} | self.method.parameters}


def read_recipe(name: str) -> Recipe:
    """A recipe that comes with ropepatch, by its name, or that of a YAML file.

    Raises:
        RopepatchError: No such recipe, no YAML, a key missing, or one unknown or of the wrong kind.
    """
    return Recipe.from_yaml(find_shipped(name, RECIPES, "recipe"))


def refuse_map(method: str) -> None:
    """Refuse to train under an attention map.

    Raises:
        RopepatchError: The method is one.
    """
    if method in MAPS:
        raise RopepatchError(
            f"nothing is trained under an attention map, got {method}",
            hint="a map keeps to what was trained: leave the recipe out, or name a scaling",
        )


def check_trainer(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of the Trainer that it does not take from a recipe.

    Raises:
        RopepatchError: An argument that it does not have, that is not for a recipe to set, or that is of no
            kind that it can take.
    """
    from transformers import TrainingArguments

    if ours := sorted(OURS & arguments.keys()):
        raise RopepatchError(
            f"trainer.{ours[0]} is not for a recipe to set", hint="ropepatch sets it, or another key does"
        )
    names = [argument.name for argument in fields(TrainingArguments) if argument.init]
    refuse_unknown(arguments, [name for name in names if name not in OURS], "trainer key")
    if arguments.get("lr_scheduler_type") in ("reduce_lr_on_plateau", "greedy"):
        raise RopepatchError("trainer.lr_scheduler_type must not wait for a measurement", hint="cosine, say")
    for argument in fields(TrainingArguments):
        value, kind = arguments.get(argument.name), str(argument.type)
        is_number = isinstance(value, int | float | None) and not isinstance(value, bool)
        if re.search(r"\b(float|int)\b", kind) and "str" not in kind:
            fits, words = is_number, "a number (with a point: 1.0e-3)"
        else:
            fits = is_number or isinstance(value, bool | str | list | dict)
            words = "a number, a text, a list or a mapping"
        if not fits:
            raise RopepatchError(f"trainer.{argument.name} must be {words}, got {shown(value)}")
