"""A scaling in a small JSON file, which stands wherever the name of a method does: what `fit` writes."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from ropepatch.errors import RopepatchError
from ropepatch.files import json_text, parse_json, whole_file
from ropepatch.scaling import Scaling, check_parameters, make_scaling
from ropepatch.scaling.rope import Rope
from ropepatch.settings import Amount, Count, Settings, Several, Weight

MARK = "ropepatch_scaling"  # the key that holds the version of the format
VERSION = 1
FIT, AUTO = "fit", "auto"  # stand for a method, too: found by measuring a model
FIT_COMMAND = "`ropepatch fit MODEL --to N --text PATH --out x.json`"
MADE = f"{FIT_COMMAND} writes such a file"
EARLIER = {  # in words: what a rope has from an earlier scaling
    "carried": "frequencies of an earlier scaling",
    "carried_attention_factor": "an earlier attention factor",
}
LARGEST = 2**63  # of whole numbers: a float holds them, so that nothing overflows later


class SavedScaling(Settings):
    """What a file holds.

    Args:
        ropepatch_scaling: The version of the format.
        method: Its name.
        parameters: Those of the method, by name, without the factor.
        factor: The target over the window.
        target: The context to reach, in tokens.
        rotary_dim: As all that follows, of the rope that is scaled; see `Rope`.
        rope_theta: The base.
        original_max_position_embeddings: The window, in tokens.
        carried: Frequencies of an earlier scaling.
        carried_attention_factor: Of an earlier scaling.
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


class Planned(Protocol):
    """What is written of a `ropepatch.extension.planning.Plan`, which reads such files."""

    @property
    def scaling(self) -> Scaling:
        """The method with its parameters."""

    @property
    def rope(self) -> Rope:
        """That of the model."""

    @property
    def target(self) -> int:
        """The context to reach, in tokens."""


@dataclass(frozen=True)
class ScalingFile:
    """A scaling, and what it was made for.

    Args:
        file: Where it was read, as the user gave it.
        scaling: The method with its parameters.
        rope: That of the model.
        target: The context to reach, in tokens.
        fit: How the parameters were found, where the file says so.
    """

    file: str
    scaling: Scaling
    rope: Rope
    target: int
    fit: dict[str, Any] | None = None

    def check(self, rope: Rope, model: str, to: int) -> None:
        """Refuse another rope or another target than those it was made for.

        Args:
            rope: That of the model it is to be used on.
            model: The name of that model.
            to: The target, in tokens.

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


def check_method(method: str, parameters: Collection[str]) -> None:
    """Refuse what is no method, or no parameter of it; beside a file there are none.

    Args:
        method: A name from `METHODS`, or a scaling file.
        parameters: The names of what is set.

    Raises:
        RopepatchError: On an unknown method or parameter, or a file that is not a scaling.
    """
    if is_scaling_file(method):
        read_scaling(method, beside=parameters)
    else:
        check_parameters(method, [name for name in parameters if name != "factor"])


def write_scaling(file: str | Path, plan: Planned, *, fit: Mapping[str, Any] | None = None) -> Path:
    """Write the scaling of a plan, whole or not at all.

    Args:
        file: It must end in .json; its folder is made.
        plan: What was planned.
        fit: How the parameters were found, as JSON-ready data.

    Raises:
        RopepatchError: It ends otherwise, exists already, or cannot be written.
    """
    if not is_scaling_file(str(file)):
        raise RopepatchError(f"{file} must end in .json", hint="by that, --method knows a file from a name")
    rope = {
        field.name: value
        for field in fields(Rope)
        if (value := getattr(plan.rope, field.name)) != field.default  # of an earlier scaling, mostly absent
    }
    content = {
        MARK: VERSION,
        "method": plan.scaling.name,
        "parameters": plan.scaling.parameters(),
        "factor": plan.scaling.factor,
        "target": plan.target,
        **rope,
        **({} if fit is None else {"fit": dict(fit)}),
    }
    text = json_text(content) + "\n"
    path = Path(file).expanduser()
    try:
        if path.exists():
            raise RopepatchError(f"{file} already exists", hint="name another file; nothing is overwritten")
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RopepatchError(f"cannot write {file}: {error.strerror}", hint="name another file") from error
    return path


def read_scaling(file: str | Path, *, beside: Collection[str] = ()) -> ScalingFile:
    """The scaling of a file.

    Args:
        file: What `write_scaling` wrote.
        beside: The names of parameters that were given beside it, which are refused.

    Raises:
        RopepatchError: No such file, no scaling, one of another version, a key or parameter that is unknown,
            missing or not what it must be.
    """
    content = _read(file)
    try:
        saved = SavedScaling.model_validate(content)
        check_parameters(saved.method, saved.parameters)
        scaling = make_scaling(saved.method, factor=saved.factor, **saved.parameters)
        rope = Rope(**{field.name: getattr(saved, field.name) for field in fields(Rope)})
    except RopepatchError as error:
        raise RopepatchError(f"{file}: {error}", hint=error.hint or MADE) from error
    if beside:
        raise RopepatchError(
            f"{', '.join(beside)} beside {file}, which holds every parameter",
            hint=f"set parameters of a method: --method {saved.method} --set ...",
        )
    return ScalingFile(str(file), scaling, rope, saved.target, saved.fit)


def _read(file: str | Path) -> dict[str, Any]:
    """The mapping that a file holds, if it says that it is a scaling of our version."""
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
        content = parse_json(text, each_key_once=True, parse_int=_whole_number)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: nested too deep, or no such ~user
        raise RopepatchError(f"{file} is not a scaling file: {error}", hint=MADE) from error
    if not isinstance(content, dict) or MARK not in content:
        raise RopepatchError(f"{file} is not a scaling file: it has no key {MARK}", hint=MADE)
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
