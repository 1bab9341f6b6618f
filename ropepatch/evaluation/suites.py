"""Suites: tasks to measure on models, with methods, at target lengths."""

from __future__ import annotations

from collections.abc import Iterable
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
from ropepatch.progress import Say
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
        name = method_label(self.name)
        given = [f"{key}={_short(value)}" for key, value in self.parameters.items()]
        return f"{name} ({', '.join(given)})" if given else name


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


def candidates() -> tuple[str, ...]:
    """The methods that `all` stands for: static ones without required parameters.

    A length-dependent method is measured at a fixed target, where it equals its static counterpart, which is
    among them. With a changing length it would not match the keys in the cache.
    """
    return tuple(name for name in formulas() if name != "none")  # the baseline


def participants(
    source: Checkpoint,
    methods: Iterable[str | dict[str, Any] | Method],
    *,
    to: Length,
    say: Say,
) -> list[tuple[Method, Plan]]:
    """The methods of a comparison with their plans; those that `all` and `remappings` leave out are said."""
    groups = {"all": candidates(), "remappings": tuple(REMAPPINGS)}
    found: dict[str, tuple[Method, Plan]] = {}
    for entry in methods:
        group = groups.get(entry) if isinstance(entry, str) else None
        for candidate in group or [entry]:
            try:
                method = read_method(candidate)
                plan = plan_method(source, method.name, method.parameters, to)
            except RopepatchError as error:
                if group is None:
                    raise
                say(f"warning: without {candidate}: {error}")
            else:
                found[method.label] = method, plan
    if not found:
        raise RopepatchError(f"no method can be planned for {source.name} to {to}")
    return list(found.values())


def read_task(content: Any) -> Task:
    """A task from YAML: a mapping with the name of the task and its settings."""
    if isinstance(content, Task):
        return content
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
ReadMethod = Annotated[
    Method, BeforeValidator(read_method, json_schema_input_type=WrittenMethod)
]
ReadTask = Annotated[
    Task, BeforeValidator(read_task, json_schema_input_type=WrittenTask)
]


class Suite(Settings):
    """Measurements over models, methods, target lengths and tasks; each model is also measured unscaled.

    Args:
        models: Folders, Hub ids or tiny; MODEL on the command line replaces them.
        methods: The scalings and position remappings.
        to: The target lengths; without methods, the greatest lengths to measure.
        tasks: The tasks to measure.
    """

    models: tuple[Text, ...] = ()
    methods: tuple[ReadMethod, ...] = ()
    to: Several[Length]
    tasks: Several[ReadTask]

    def narrowed(self, limit: int | None, seed: int | None) -> Suite:
        """The suite with at most ``limit`` pieces, prompts and documents, and with a seed."""
        if limit is not None and limit < 1:
            raise RopepatchError(
                f"{argument('limit')} must be at least 1, got {limit}",
                hint="leave it out for no limit",
            )
        random = [task for task in self.tasks if "seed" in type(task).model_fields]
        if seed is not None and not random:
            raise RopepatchError(
                f"{argument('seed')} has no effect: no task of the suite is random",
                hint="leave it out",
            )
        tasks = []
        for task in self.tasks:
            if seed is not None and task in random:
                task = task.model_copy(update={"seed": seed})
            # Last, because a copy with other settings loses it
            tasks.append(task if limit is None else task.limited(limit))
        return self.model_copy(update={"tasks": tuple(tasks)})

    def check(self) -> None:
        """Refuse the same method or task twice."""
        methods = [method.label for method in self.methods]
        tasks = [f"{task.name} {task.model_dump()}" for task in self.tasks]
        for key, values in (("methods", methods), ("tasks", tasks)):
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
