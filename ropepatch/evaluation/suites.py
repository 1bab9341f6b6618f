"""Suites: tasks to measure on models, with methods, at target lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from operator import or_
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, with_config
from typing_extensions import TypedDict

from ropepatch.attention import REMAPPINGS
from ropepatch.errors import RopepatchError, argument
from ropepatch.evaluation.tasks import TASKS, Task
from ropepatch.extension.planning import Plan, check_method, plan_method
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.scaling import METHODS, formulas
from ropepatch.scaling.file import method_label
from ropepatch.settings import (
    SUITES,
    Length,
    Settings,
    Several,
    Text,
    find_shipped,
    named_in,
    seed_of,
    shown,
)


def _each(kind: type, read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A validator that parses every entry of a list; errors name the place of the entry."""

    def entries(values: Any) -> Any:
        if not isinstance(values, tuple):
            return values
        read_values = []
        for number, value in enumerate(values):
            try:
                read_values.append(value if isinstance(value, kind) else read(value))
            except RopepatchError as error:
                place = f"{kind.__name__.lower()}s[{number}]"
                raise RopepatchError(f"{place}: {error}", hint=error.hint) from error
        return tuple(read_values)

    return entries


class Method(Settings):
    """A scaling or a position remapping with its parameters.

    Args:
        name: A name from `METHODS` or `REMAPPINGS`, or a scaling file, which contains the parameters.
        parameters: The parameters that differ from their defaults.
    """

    name: Text
    parameters: dict[str, Any] = Field(default_factory=dict)

    @property
    def label(self) -> str:
        """Its name in tables and figures."""
        parameters = ", ".join(
            f"{name}={_short(value)}" for name, value in self.parameters.items()
        )
        return (
            f"{method_label(self.name)} ({parameters})"
            if parameters
            else method_label(self.name)
        )


def read_method(content: Any) -> Method:
    """A method from YAML: its name or scaling file, or a mapping with a name and parameters."""
    if isinstance(content, Method):
        return content
    parameters = dict(content) if isinstance(content, dict) else {"name": content}
    name = parameters.pop("name", None)
    if not isinstance(name, str):
        raise RopepatchError(
            f"a method must be a name, or a mapping with a name, got {content!r}"
        )
    check_method(name, parameters)
    return Method(name=name, parameters=parameters)


GROUPS = "all", "remappings"  # all candidates, all position remappings


def candidates() -> tuple[str, ...]:
    """The methods that `all` stands for: static ones without required parameters.

    A length-dependent method is measured at a fixed target, where it equals its static counterpart, which is
    among them. With a changing length it would not match the keys in the cache.
    """
    return tuple(name for name in formulas() if name != "none")  # the baseline


def participants(
    source: Checkpoint, methods: Iterable[str | dict[str, Any] | Method], *, to: Length
) -> tuple[list[tuple[Method, Plan]], dict[str, str]]:
    """The methods of a comparison with their plans, and those that `all` and `remappings` leave out."""
    groups = dict(zip(GROUPS, (candidates(), tuple(REMAPPINGS)), strict=True))
    found: dict[str, tuple[Method, Plan]] = {}
    left_out: dict[str, RopepatchError] = {}
    for entry in methods:
        group = groups.get(entry) if isinstance(entry, str) else None
        for candidate in [entry] if group is None else group:
            try:
                method = read_method(candidate)
                plan = plan_method(source, method.name, method.parameters, to)
            except RopepatchError as error:
                if group is None:
                    raise
                left_out[str(candidate)] = error
            else:
                found[method.label] = method, plan
    if left_out and not found:
        raise next(iter(left_out.values()))
    return list(found.values()), {name: str(why) for name, why in left_out.items()}


def read_task(content: Any) -> Task:
    """A task from YAML: a mapping with the name of the task and its settings."""
    if not isinstance(content, dict) or "task" not in content:
        raise RopepatchError(
            f"a task must be a mapping with the key task, got {shown(content)}",
            hint=f"tasks: {', '.join(TASKS)}",
        )
    settings = {key: content[key] for key in content if key != "task"}
    return TASKS.find(content["task"]).model_validate(settings)


@with_config(ConfigDict(extra="allow"))
class NamedMethod(TypedDict):
    """A method with its parameters."""

    name: Text


# As YAML has them, for editors:
WrittenScaling = (
    Annotated[str, named_in(METHODS)]
    | Annotated[str, Field(pattern=r"\.json$")]
    | NamedMethod
)
WrittenMethod = WrittenScaling | Annotated[str, named_in(REMAPPINGS)]
WrittenTask: Any = reduce(or_, TASKS.values())


class Suite(Settings):
    """Measurements over models, methods, target lengths and tasks; each model is also measured unscaled.

    Args:
        models: Folders, Hub ids or tiny; MODEL on the command line replaces them.
        methods: The scalings and position remappings.
        to: The target lengths; without methods, the greatest lengths to measure.
        tasks: The tasks to measure.
    """

    models: tuple[Text, ...] = ()
    methods: Annotated[
        tuple[Method, ...],
        BeforeValidator(
            _each(Method, read_method), json_schema_input_type=tuple[WrittenMethod, ...]
        ),
    ] = ()
    to: Several[Length]
    tasks: Annotated[
        Several[Task],
        BeforeValidator(
            _each(Task, read_task), json_schema_input_type=Several[WrittenTask]
        ),
    ]

    def narrowed(self, limit: int | None, seed: int | None) -> Suite:
        """The suite with at most ``limit`` pieces, prompts and documents, and with a seed."""
        if limit is not None and limit < 1:
            raise RopepatchError(
                f"{argument('limit')} must be at least 1, got {limit}",
                hint="leave it out for no limit",
            )
        tasks = self.tasks
        if seed is not None:
            if not any("seed" in type(task).model_fields for task in tasks):
                raise RopepatchError(
                    f"{argument('seed')} has no effect: no task of the suite is random",
                    hint="leave it out",
                )
            tasks = tuple(
                task.model_copy(update={"seed": seed})
                if "seed" in type(task).model_fields
                else task
                for task in tasks
            )
        if limit is not None:  # last, because a copy with other settings loses it
            tasks = tuple(task.limited(limit) for task in tasks)
        return self.model_copy(update={"tasks": tasks})

    def check(self) -> None:
        """Refuse the same method or task twice."""
        for key, values in (
            ("methods", [method.label for method in self.methods]),
            ("tasks", [f"{task.name} {task.model_dump()}" for task in self.tasks]),
        ):
            if len(set(values)) < len(values):
                raise RopepatchError(f"two {key} are the same: {values}")


def read_suite(name: str) -> Suite:
    """A bundled suite by its name, or the suite of a YAML file."""
    return Suite.from_yaml(find_shipped(name, SUITES, "suite"))


def _short(value: Any) -> str:
    """A value within a label; of a list its length and a hash."""
    if isinstance(value, list | tuple):
        return f"{len(value)} numbers {seed_of(*value) % 16**6:06x}"
    return str(value)
