"""The recipe of the bundled checkpoint; unknown, missing and impossible settings are errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from huggingface_hub.errors import StrictDataclassError
from pretraining_rows import MATERIALS
from pydantic import Field
from transformers import LlamaConfig, SchedulerType

from ropepatch.data.tiny.grammar import BOS, EOS
from ropepatch.encodings import Encoding, make_encoding
from ropepatch.errors import RopepatchError
from ropepatch.settings import (
    Amount,
    Count,
    Settings,
    Several,
    Text,
    Whole,
    named_in,
    refuse_unknown,
)

if TYPE_CHECKING:
    from pathlib import Path

# The folder of the finished checkpoint, next to those of the stages
PUBLISHED = "checkpoint"

SCHEDULES = [schedule.value for schedule in SchedulerType]


class Stage(Settings):
    """Steps with one mixture of materials.

    Args:
        name: Names its folder.
        mixture: The share of rows of each of `pretraining_rows.MATERIALS`.
        windows: Tokens per row; the steps take one value after the other, and come in an order of their own.
        tokens_per_step: Rows times tokens per row, at most.
        steps: Optimiser steps.
        learning_rate: The peak.
        lr_scheduler_type: One of transformers' schedules, after a warm-up of 50 steps.
        bf16: Multiply in bfloat16.
    """

    name: Annotated[str, Field(pattern=r"^[\w-]+$")]
    mixture: Annotated[
        dict[Annotated[str, named_in(MATERIALS)], Amount], Field(min_length=1)
    ]
    windows: Several[Count]
    tokens_per_step: Count
    steps: Count
    learning_rate: Amount
    lr_scheduler_type: Annotated[str, named_in(SCHEDULES)] = "constant_with_warmup"
    bf16: bool = False

    def check(self) -> None:
        """Raise `RopepatchError` for unknown or reserved names, and for rows longer than a step."""
        refuse_unknown(self.mixture, MATERIALS, "material")
        refuse_unknown([self.lr_scheduler_type], SCHEDULES, "lr_scheduler_type")
        if self.name == PUBLISHED:
            raise RopepatchError(
                f"name must not be {PUBLISHED}, the folder of the finished checkpoint"
            )
        if max(self.windows) > self.tokens_per_step:
            raise RopepatchError(
                f"a row of {max(self.windows)} tokens has no room in {self.tokens_per_step} tokens_per_step"
            )


class Recipe(Settings):
    """What `recipes/tiny/pretrain.yaml` holds.

    Args:
        seed: Of the weights and of every row.
        vocab_size: Of the tokenizer that is trained first.
        texts: Files or folders of text, as seen from the working directory.
        model: What LlamaConfig takes.
        stages: Run one after the other.
        encoding: The name of a position encoding, and its parameters, instead of RoPE.
    """

    seed: Whole
    vocab_size: Count
    texts: tuple[Text, ...]
    model: dict[str, Any]
    stages: Several[Stage]
    encoding: dict[str, Any] | None = None

    def check(self) -> None:
        """Raise `RopepatchError` for a model that cannot be built, and for stages with one name."""
        if self.encoding is not None:
            self.position_encoding()
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise RopepatchError(f"two stages have the same name: {', '.join(names)}")
        own = {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "dtype"}
        refuse_unknown(
            self.model,
            [key for key in LlamaConfig().to_dict() if key not in own],
            "model key",
        )
        if "max_position_embeddings" not in self.model:
            raise RopepatchError(
                "model has no max_position_embeddings",
                hint="it is the window to be stated",
            )
        try:
            self.config()
        except (StrictDataclassError, TypeError, ValueError) as error:
            raise RopepatchError(f"model: {_one_line(error)}") from error

    def position_encoding(self) -> Encoding:
        """Return the encoding that replaces RoPE, if `encoding` is given.

        Raises:
            RopepatchError: If it is no encoding with its parameters.
        """
        if self.encoding is None or not isinstance(self.encoding.get("name"), str):
            raise RopepatchError(
                f"encoding must be a name with its parameters, got {self.encoding!r}",
                hint="encoding: {name: alibi}",
            )
        parameters = {
            key: value for key, value in self.encoding.items() if key != "name"
        }
        return make_encoding(self.encoding["name"], **parameters)

    def config(self) -> LlamaConfig:
        """Return the model's configuration."""
        return LlamaConfig(
            **self.model,
            vocab_size=self.vocab_size,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=None,
        )


def read_recipe(path: Path) -> Recipe:
    """Read the recipe of a YAML file.

    Raises:
        RopepatchError: If the file is missing or no YAML, or a key is missing, unknown or of a wrong type.
    """
    return Recipe.from_yaml(path)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
