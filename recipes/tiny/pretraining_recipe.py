"""The recipe of the bundled checkpoint, read strictly: what is unknown, missing or impossible is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig, SchedulerType

from ropepatch.data.documents import BOS, EOS
from ropepatch.data.tiny.mixture import MATERIALS
from ropepatch.encodings import Encoding, make_encoding
from ropepatch.errors import RopepatchError
from ropepatch.settings import check_keys, is_amount, is_count, read_yaml, refuse_unknown

if TYPE_CHECKING:
    from pathlib import Path

PUBLISHED = "checkpoint"  # the folder of the finished checkpoint, beside those of the stages


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Steps with one mixture of materials.

    Args:
        name: Names its folder.
        mixture: The share of rows of each of `ropepatch.data.tiny.mixture.MATERIALS`.
        windows: Tokens per row; the steps take one value after the other, and come in an order of their own.
        tokens_per_step: Rows times tokens per row, at most.
        steps: Optimiser steps.
        learning_rate: The peak.
        lr_scheduler_type: One of transformers' schedules, after a warm-up of 50 steps.
        bf16: Multiply in bfloat16.

    Raises:
        RopepatchError: One of these is not what it must be.
    """

    name: str
    mixture: dict[str, float]
    windows: list[int]
    tokens_per_step: int
    steps: int
    learning_rate: float
    lr_scheduler_type: str = "constant_with_warmup"
    bf16: bool = False

    def __post_init__(self) -> None:
        schedules = [schedule.value for schedule in SchedulerType]
        is_name = isinstance(self.name, str) and re.fullmatch(r"[\w-]+", self.name) and self.name != PUBLISHED
        is_mixture = (
            isinstance(self.mixture, dict) and self.mixture and all(map(is_amount, self.mixture.values()))
        )
        is_windows = isinstance(self.windows, list) and self.windows and all(map(is_count, self.windows))
        for key, fits, expected in (
            ("name", is_name, f"letters, digits, _ and -, and not {PUBLISHED}: it names a folder"),
            ("mixture", is_mixture, "shares above 0 by material"),
            ("windows", is_windows, "a list of whole numbers above 0"),
            ("tokens_per_step", is_count(self.tokens_per_step), "a whole number above 0"),
            ("steps", is_count(self.steps), "a whole number above 0"),
            ("learning_rate", is_amount(self.learning_rate), "a number above 0 (with a point: 2.0e-3)"),
            ("lr_scheduler_type", self.lr_scheduler_type in schedules, f"one of {', '.join(schedules)}"),
            ("bf16", isinstance(self.bf16, bool), "true or false"),
        ):
            if not fits:
                raise RopepatchError(f"{key} must be {expected}, got {getattr(self, key)!r}")
        refuse_unknown(self.mixture, MATERIALS, "material")
        if max(self.windows) > self.tokens_per_step:
            raise RopepatchError(
                f"a row of {max(self.windows)} tokens has no room in {self.tokens_per_step} tokens_per_step"
            )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What `recipes/tiny/pretrain.yaml` holds.

    Args:
        seed: Of the weights and of every row.
        vocab_size: Of the tokenizer that is trained first.
        texts: Files or folders of text, as seen from the working directory.
        model: What LlamaConfig takes.
        stages: Run one after the other.
        encoding: The name of a position encoding, and its parameters, in the place of the rope.

    Raises:
        RopepatchError: One of these is not what it must be.
    """

    seed: int
    vocab_size: int
    texts: list[str]
    model: dict[str, Any]
    stages: list[Stage]
    encoding: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        is_texts = isinstance(self.texts, list) and all(isinstance(text, str) for text in self.texts)
        for key, fits, expected in (
            ("seed", type(self.seed) is int and self.seed >= 0, "a whole number from 0"),
            ("vocab_size", is_count(self.vocab_size), "a whole number above 0"),
            ("texts", is_texts, "a list of files or folders"),
            ("model", isinstance(self.model, dict), "a mapping"),
            ("stages", isinstance(self.stages, list) and self.stages, "a list of stages"),
        ):
            if not fits:
                raise RopepatchError(f"{key} must be {expected}, got {getattr(self, key)!r}")
        if self.encoding is not None:
            self.position_encoding()
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise RopepatchError(f"two stages have the same name: {', '.join(names)}")
        own = {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "dtype"}
        refuse_unknown(self.model, [key for key in LlamaConfig().to_dict() if key not in own], "model key")
        if "max_position_embeddings" not in self.model:
            raise RopepatchError("model has no max_position_embeddings", hint="it is the window to be stated")
        try:
            self.config()
        except (StrictDataclassError, TypeError, ValueError) as error:
            raise RopepatchError(f"model: {_one_line(error)}") from error

    def position_encoding(self) -> Encoding:
        """What stands in the place of the rope, where `encoding` is given.

        Raises:
            RopepatchError: If it is no encoding with its parameters.
        """
        named = isinstance(self.encoding, dict) and isinstance(self.encoding.get("name"), str)
        if self.encoding is None or not named or not all(isinstance(key, str) for key in self.encoding):
            raise RopepatchError(
                f"encoding must be a name with its parameters, got {self.encoding!r}",
                hint="encoding: {name: alibi}",
            )
        parameters = {key: value for key, value in self.encoding.items() if key != "name"}
        return make_encoding(self.encoding["name"], **parameters)

    def config(self) -> LlamaConfig:
        """The model's configuration."""
        return LlamaConfig(
            **self.model, vocab_size=self.vocab_size, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=None
        )


def read_recipe(path: Path) -> Recipe:
    """The recipe of a YAML file.

    Raises:
        RopepatchError: No such file, no YAML, a key missing, or one unknown or of the wrong kind.
    """
    content = read_yaml(path, "recipe")
    try:
        check_keys(Recipe, content)
        if not isinstance(content["stages"], list):
            raise RopepatchError("stages must be a list")
        for stage in content["stages"]:
            check_keys(Stage, stage)
        return Recipe(**content | {"stages": [Stage(**stage) for stage in content["stages"]]})
    except RopepatchError as error:
        raise RopepatchError(f"{path}: {error}", hint=error.hint) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
