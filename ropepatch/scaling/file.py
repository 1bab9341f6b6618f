"""Scaling files: JSON files with a method and its parameters, accepted wherever a method name is."""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ropepatch.errors import RopepatchError, argument
from ropepatch.files import parse_json, read_text
from ropepatch.scaling import METHODS, Scaling, make_scaling
from ropepatch.scaling.rope import Rope
from ropepatch.settings import MAX_NUMBER, Settings, shown

HINT = f"name a method of `ropepatch methods`; custom takes your own {argument('settings', 'divisors=FILE')}"
EARLIER = {  # the traces of an earlier scaling, for messages
    "carried": "frequencies of an earlier scaling",
    "carried_attention_factor": "an earlier attention factor",
}


class ScalingFile(Settings):
    """The content of a scaling file: a scaling, the RoPE it applies to and its target length.

    Args:
        ropepatch_scaling: The version of the format.
        method: Name of the method.
        parameters: The method's own parameters by name, without the factor.
        factor: s.
        target: The target length, in tokens.
        rotary_dim: A parameter of the RoPE before scaling, as the next four keys; see `Rope`.
    """

    ropepatch_scaling: Literal[1]
    method: str
    parameters: dict[str, Any]
    factor: Any
    target: Annotated[int, Field(gt=0, le=MAX_NUMBER)]
    rotary_dim: Any
    rope_theta: Any
    original_max_position_embeddings: Any
    carried: Any = None
    carried_attention_factor: Any = 1.0

    @cached_property
    def scaling(self) -> Scaling:
        """The method with its parameters."""
        METHODS.find(self.method).refuse_unknown(self.parameters)
        return make_scaling(self.method, factor=self.factor, **self.parameters)

    @cached_property
    def rope(self) -> Rope:
        """The model's RoPE before this scaling."""
        return Rope(**{key: getattr(self, key) for key in Rope.model_fields})

    def check(self) -> None:
        """Raise a `RopepatchError` unless scaling and RoPE are valid."""
        _ = self.scaling, self.rope

    def check_model(self, file: str, rope: Rope, model: str, to: int) -> None:
        """Raise a `RopepatchError` unless RoPE and target length are those the file was made for."""
        for key, wanted in self.rope:
            here = getattr(rope, key)
            if not _same(wanted, here):
                raise RopepatchError(
                    f"{file} is for a model with {EARLIER.get(key, key)} {shown(wanted)}, "
                    f"{model} has {shown(here)}",
                    hint="use the file for its own model, or name a method of `ropepatch methods`",
                )
        if to != self.target:
            raise RopepatchError(
                f"{file} is for a target of {self.target} tokens, got {to}",
                hint=f"use {argument('to', self.target)}",
            )


def is_scaling_file(method: str) -> bool:
    """Return whether a method is given as a file."""
    return method.endswith(".json")


def method_label(method: str) -> str:
    """Return a method's name for folders, tables and figures; for a file, its stem."""
    return Path(method).stem if is_scaling_file(method) else method


def read_scaling(file: str | Path, *, extra: Collection[str] = ()) -> ScalingFile:
    """Read a scaling file; raise a `RopepatchError` if the user also sets ``extra`` parameters."""
    try:
        content = parse_json(read_text(Path(file).expanduser()))
    # RuntimeError: nested too deep, or no such ~user
    except (OSError, ValueError, RuntimeError) as error:
        raise RopepatchError(
            f"{file} is not a scaling file: {error}", hint=HINT
        ) from error
    try:
        read = ScalingFile.model_validate(content)
    except RopepatchError as error:
        raise RopepatchError(f"{file}: {error}", hint=error.hint or HINT) from error
    if extra:
        raise RopepatchError(
            f"{', '.join(extra)} cannot be set: {file} contains every parameter",
            hint=f"give the method to set its parameters: {argument('method', read.method)}",
        )
    return read


def _same(there: Any, here: Any) -> bool:
    """Compare two values, frequencies up to the rounding of another machine."""
    if isinstance(there, tuple) and isinstance(here, tuple):
        return all(
            math.isclose(*pair, rel_tol=1e-5) for pair in zip(there, here, strict=True)
        )
    return bool(there == here)
