"""A scaling in a small JSON file, which stands wherever the name of a method does: what `fit` writes."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropepatch.errors import RopepatchError
from ropepatch.files import json_text, parse_json, read_text, whole_file
from ropepatch.scaling import METHODS, Scaling, make_scaling
from ropepatch.scaling.rope import Rope
from ropepatch.settings import Amount, Count, Settings, Several, Weight

MARK = "ropepatch_scaling"  # the key that holds the version of the format
VERSION = 1
FIT, AUTO = "fit", "auto"  # stand for a method, too: found by measuring a model
FIT_COMMAND = "`ropepatch fit MODEL --to N --text PATH --out x.json`"
HINT = f"{FIT_COMMAND} writes such a file"
EARLIER = {  # in words: what a rope has from an earlier scaling
    "carried": "frequencies of an earlier scaling",
    "carried_attention_factor": "an earlier attention factor",
}
LARGEST = 2**63  # of whole numbers: a float holds them, so that nothing overflows later


class SavedScaling(Settings):
    """What a file holds: a method with its parameters, the fields of the `Rope` it scales, the target.

    Args:
        ropepatch_scaling: The version of the format.
        parameters: The method's own parameters by name, without the factor.
        fit: How the parameters were found, where the file says so.
    """

    ropepatch_scaling: Count
    method: str
    parameters: dict[str, Any]
    factor: Amount
    target: Count
    rotary_dim: Count
    rope_theta: Amount
    original_max_position_embeddings: Count
    carried: Several[Weight] | None = None
    carried_attention_factor: Amount = 1.0
    fit: dict[str, Any] | None = None


@dataclass(frozen=True)
class ScalingFile:
    """A scaling, and what it was made for.

    Args:
        file: Where it was read, as the user gave it.
        scaling: The method with its parameters.
        rope: The rope of the model before.
        target: The context to reach, in tokens.
        fit: How the parameters were found, where the file says so.
    """

    file: str
    scaling: Scaling
    rope: Rope
    target: int
    fit: dict[str, Any] | None = None

    def check(self, rope: Rope, model: str, to: int) -> None:
        """Refuse a model with another rope, or another target in tokens, than those it was made for.

        Raises:
            RopepatchError: With the first number that differs.
        """
        for key, wanted in vars(self.rope).items():
            here = getattr(rope, key)
            if not _same(wanted, here):
                raise RopepatchError(
                    f"{self.file} is for a model with {EARLIER.get(key, key)} {reprlib.repr(wanted)}, "
                    f"{model} has {reprlib.repr(here)}",
                    hint=f"fit this model: {FIT_COMMAND}",
                )
        if to != self.target:
            raise RopepatchError(
                f"{self.file} is for a target of {self.target} tokens, got {to}",
                hint=f"--to {self.target}, or fit it for {to}: {FIT_COMMAND}",
            )


def is_scaling_file(method: str) -> bool:
    """Whether what stands for a method is a file and not a name."""
    return method.endswith(".json")


def method_label(method: str) -> str:
    """What folders, tables and figures call a method: its name, or that of its file without the ending."""
    return Path(method).stem if is_scaling_file(method) else method


def write_scaling(
    file: str | Path, scaling: Scaling, rope: Rope, target: int, *, fit: Mapping[str, Any] | None = None
) -> Path:
    """Write a scaling, whole or not at all; the arguments are those of `ScalingFile`.

    Raises:
        RopepatchError: It ends otherwise, exists already, or cannot be written.
    """
    if not is_scaling_file(str(file)):
        raise RopepatchError(f"{file} must end in .json", hint="by that, --method knows a file from a name")
    content = {
        MARK: VERSION,
        "method": scaling.name,
        "parameters": scaling.parameters(),
        "factor": scaling.factor,
        "target": target,
        **vars(rope),
        "fit": fit,
    }
    unsaid = {"carried": None, "carried_attention_factor": 1.0, "fit": None}
    text = json_text({key: value for key, value in content.items() if value != unsaid.get(key, ...)}) + "\n"
    exists = RopepatchError(f"{file} already exists", hint="name another file; nothing is overwritten")
    try:
        path = Path(file).expanduser()
        if path.exists():
            raise exists
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, new=True) as partial:
            partial.write_text(text, encoding="utf-8")
    except (OSError, RuntimeError) as error:  # RuntimeError: no such ~user
        if isinstance(error, FileExistsError) and path.is_file():
            raise exists from error
        reason = getattr(error, "strerror", None) or error
        raise RopepatchError(f"cannot write {file}: {reason}", hint="name another file") from error
    return path


def read_scaling(file: str | Path, *, beside: Collection[str] = ()) -> ScalingFile:
    """The scaling that `write_scaling` wrote; parameters ``beside`` a file, by their names, are refused.

    Raises:
        RopepatchError: No such file, no scaling, one of another version, a key or parameter that is unknown,
            missing or not what it must be.
    """
    content = _read(file)
    try:
        saved = SavedScaling.model_validate(content)
        METHODS.find(saved.method).refuse_unknown(saved.parameters)
        scaling = make_scaling(saved.method, factor=saved.factor, **saved.parameters)
        rope = Rope(**{key: getattr(saved, key) for key in Rope.model_fields})
    except RopepatchError as error:
        raise RopepatchError(f"{file}: {error}", hint=error.hint or HINT) from error
    if beside:
        raise RopepatchError(
            f"{', '.join(beside)} beside {file}, which holds every parameter",
            hint=f"set parameters of a method: --method {saved.method} --set ...",
        )
    return ScalingFile(str(file), scaling, rope, saved.target, saved.fit)


def _read(file: str | Path) -> dict[str, Any]:
    """The mapping that a file holds, if it says that it is a scaling of our version."""
    try:
        text = read_text(Path(file).expanduser())
        content = parse_json(text, each_key_once=True, parse_int=_whole_number)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: nested too deep, or no such ~user
        raise RopepatchError(f"{file} is not a scaling file: {error}", hint=HINT) from error
    if not isinstance(content, dict) or MARK not in content:
        raise RopepatchError(f"{file} is not a scaling file: it has no key {MARK}", hint=HINT)
    version = content[MARK]
    if type(version) is not int or version != VERSION:
        raise RopepatchError(
            f"{file} is a scaling file of version {reprlib.repr(version)}, expected {VERSION}",
            hint="a newer ropepatch may read it: pip install --upgrade ropepatch",
        )
    return content


def _whole_number(text: str) -> int:
    if abs(number := int(text)) >= LARGEST:
        raise ValueError(f"{reprlib.repr(text)} is too large")
    return number


def _same(there: Any, here: Any) -> bool:
    """Whether two values are one; the frequencies of equally wide ropes up to another machine's rounding."""
    if isinstance(there, tuple) and isinstance(here, tuple):
        return all(math.isclose(*pair, rel_tol=1e-5) for pair in zip(there, here, strict=True))
    return bool(there == here)
