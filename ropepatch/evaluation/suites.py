"""Suites: which tasks are measured on which models, with which methods, at which targets."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.tasks import TASKS, LmEvalTask, PasskeyTask, PerplexityTask, Task, check_text
from ropepatch.files import shipped
from ropepatch.scaling.file import check_method, method_label
from ropepatch.settings import (
    Length,
    check_keys,
    read_yaml,
    refuse_unknown,
    relative_length,
    seed_of,
)

__all__ = [
    "LmEvalTask",
    "Method",
    "PasskeyTask",
    "PerplexityTask",
    "Suite",
    "Task",
    "check_text",
    "read_method",
    "read_suite",
    "suite_names",
]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A scaling and its parameters.

    Args:
        name: From `METHODS`, or a scaling file, which has the parameters.
        parameters: Those that are not left at their defaults.
    """

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What tables and figures call it."""
        given = ", ".join(f"{name}={_short(value)}" for name, value in self.parameters.items())
        return f"{method_label(self.name)} ({given})" if given else method_label(self.name)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Jobs over models, methods, targets and tasks; every model is also measured as it is.

    Args:
        models: Folders, Hub ids or tiny; the command line's MODEL takes their place.
        methods: The scalings.
        to: The targets; without methods, how far the models are read.
        tasks: What is measured.

    Raises:
        RopepatchError: One of these is not what it must be.
    """

    models: tuple[str, ...] = ()
    methods: tuple[Method, ...] = ()
    to: tuple[Length, ...]
    tasks: tuple[Task, ...]

    def __post_init__(self) -> None:
        if not self.to or not self.tasks:
            raise RopepatchError("a suite needs at least one target and one task")
        for key, values in (
            ("methods", [method.label for method in self.methods]),
            ("tasks", [str(asdict(task)) + task.name for task in self.tasks]),
        ):
            if len(set(values)) < len(values):
                raise RopepatchError(f"two {key} are the same: {values}")


def suite_names() -> list[str]:
    """The suites that come with ropepatch."""
    return sorted(file.stem for file in shipped("eval/suites").glob("*.yaml"))


def read_suite(name: str) -> Suite:
    """A suite that comes with ropepatch, by its name, or that of a YAML file.

    Raises:
        RopepatchError: No such suite, no YAML, a key missing, or one unknown or of the wrong kind.
    """
    if not name.endswith((".yaml", ".yml")):
        refuse_unknown([name], suite_names(), "suite")
    file = Path(name) if name.endswith((".yaml", ".yml")) else shipped("eval/suites") / f"{name}.yaml"
    content = read_yaml(file, "suite")
    try:
        check_keys(Suite, content)
        return Suite(
            models=tuple(map(str, _listed(content, "models"))),
            methods=tuple(map(read_method, _listed(content, "methods"))),
            to=_lengths("to", _listed(content, "to")),
            tasks=tuple(map(_task, _listed(content, "tasks"))),
        )
    except RopepatchError as error:
        raise RopepatchError(f"{file}: {error}", hint=error.hint) from error


def read_method(content: Any) -> Method:
    """A method from YAML: its name or scaling file, or a mapping with a name and parameters.

    Raises:
        RopepatchError: No such method or file, or a parameter it does not have.
    """
    parameters = dict(content) if isinstance(content, dict) else {"name": content}
    name = parameters.pop("name", None)
    if not isinstance(name, str):
        raise RopepatchError(f"a method must be a name, or a mapping with a name, got {content!r}")
    check_method(name, parameters)
    return Method(name=name, parameters=parameters)


def _task(content: Any) -> Task:
    if not isinstance(content, dict) or "task" not in content:
        raise RopepatchError(
            f"a task must be a mapping with the key task, got {content!r}", hint=f"tasks: {', '.join(TASKS)}"
        )
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in content.items() if key != "task"}
    refuse_unknown([content["task"]], TASKS, "task")
    kind: Any = TASKS[content["task"]]
    check_keys(kind, values)
    if values.get("lengths") is not None:
        values["lengths"] = _lengths("lengths", values["lengths"])
    for key in ("depths", "tasks"):
        if key in values and not isinstance(values[key], tuple):
            raise RopepatchError(f"{key} must be a list, got {values[key]!r}")
    task: Task = kind(**values)
    return task


def _short(value: Any) -> str:
    """A value within a label; of a list its length and a hash."""
    if isinstance(value, list | tuple):
        return f"{len(value)} numbers {seed_of(*value) % 16**6:06x}"
    return str(value)


def _listed(content: dict[str, Any], key: str) -> list[Any]:
    values = content.get(key, [])
    if not isinstance(values, list):
        raise RopepatchError(f"{key} must be a list, got {values!r}")
    return values


def _lengths(key: str, values: Any) -> tuple[Length, ...]:
    if not isinstance(values, list | tuple) or not values:
        raise RopepatchError(f"{key} must be a list of lengths, got {values!r}")
    for value in values:
        relative_length(value, 1)
    return tuple(values)
