"""Suites: which tasks are measured on which models, with which methods, at which targets."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ropepatch.errors import RopepatchError
from ropepatch.files import shipped
from ropepatch.scaling.file import check_method, method_label
from ropepatch.settings import (
    Length,
    check_keys,
    is_count,
    read_yaml,
    refuse_unknown,
    relative_length,
    seed_of,
)

PROTOCOLS = ("one-pass", "sliding", "truncated", "disjoint")
BOS = ("document", "window", "none")


@dataclass(frozen=True, kw_only=True)
class PerplexityTask:
    """Read text.

    Args:
        text: A file, a folder, a `datasets` id or a saved set; None for the text of the command line, or for
            the tales of tiny.
        field: The column or key of a document's text.
        split: Of a `datasets` id or a saved set.
        windows: Join the documents and read at most so many windows, spread over all; None for all.
        documents: Do not join, but read so many: the first that have the greatest length.
        lengths: In tokens; None for L/2, L, 2L ... the target.
        read: Tokens of a piece of text, over which windows slide or lie side by side; None for twice the
            greatest length. Only of `sliding` and `disjoint`.
        protocol: `one-pass`, which gives every length at once, or `sliding`, `truncated` or `disjoint`, where
            the lengths are those of the window and each is a pass of its own.
        stride: Of `sliding`, in tokens.
        bos: Where the beginning-of-sequence token goes: before each `document`, each `window`, or `none`.
        gain: Also measure what the tokens beyond the trained context bring; by a further pass.

    Raises:
        RopepatchError: One of these is not what it must be.
    """

    name: ClassVar[str] = "perplexity"
    text: str | None = None
    field: str = "text"
    split: str = "test"
    windows: int | None = 24
    documents: int | None = None
    lengths: tuple[Length, ...] | None = None
    read: Length | None = None
    protocol: str = "one-pass"
    stride: int | None = None
    bos: str = "document"
    gain: bool = False

    def __post_init__(self) -> None:
        for key in ("text", "field", "split"):
            if not isinstance(getattr(self, key), str | None if key == "text" else str):
                raise RopepatchError(f"{key} must be a text, got {getattr(self, key)!r}")
        if not isinstance(self.gain, bool):
            raise RopepatchError(f"gain must be true or false, got {self.gain!r}")
        _check_name("protocol", self.protocol, PROTOCOLS)
        _check_name("bos", self.bos, BOS)
        for key in ("windows", "documents", "stride"):
            _check_count(key, getattr(self, key))
        if (self.stride is not None) != (self.protocol == "sliding"):
            raise RopepatchError(
                f"protocol {self.protocol} with stride {self.stride}", hint="sliding takes a stride: 256, say"
            )
        if self.read is not None:
            relative_length(self.read, 1)
            if self.protocol not in ("sliding", "disjoint"):
                raise RopepatchError(f"read needs the protocol sliding or disjoint, got {self.protocol}")
        if self.gain and self.protocol != "one-pass":
            raise RopepatchError(f"gain needs the protocol one-pass, got {self.protocol}")
        if self.bos == "window" and self.protocol == "one-pass":
            raise RopepatchError("bos window needs a protocol with windows, got one-pass")
        if self.bos != "document" and self.documents is None:
            raise RopepatchError(
                f"bos {self.bos} needs documents that are not joined", hint="documents: 10, or --documents 10"
            )


@dataclass(frozen=True, kw_only=True)
class PasskeyTask:
    """Ask for pass keys.

    Args:
        lengths: In tokens; None for L/2, L, 2L ... the target.
        depths: Where the key stands, from 0 to 1.
        trials: Keys per length and depth.
        seed: Of the keys.
        template: A YAML file with the words; None for those that come with ropepatch.
        distractors: Further keys in the text that are not asked for.
        queries: How many of the keys are asked for, one after the other.
        threshold: The share found that counts as reading a length (RULER's 85.6 %).

    Raises:
        RopepatchError: One of these is not what it must be.
    """

    name: ClassVar[str] = "passkey"
    lengths: tuple[Length, ...] | None = None
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    trials: int = 4
    seed: int = 0
    template: str | None = None
    distractors: int = 0
    queries: int = 1
    threshold: float = 0.856

    def __post_init__(self) -> None:
        _check_count("trials", self.trials)
        _check_count("queries", self.queries)
        for key in ("seed", "distractors"):
            if type(getattr(self, key)) is not int or getattr(self, key) < 0:
                raise RopepatchError(f"{key} must be a whole number from 0, got {getattr(self, key)!r}")
        if not self.depths or self.threshold == 0:
            raise RopepatchError(
                f"need depths and a threshold above 0, got {self.depths!r} and {self.threshold!r}"
            )
        if self.queries > 1 + self.distractors:
            raise RopepatchError(
                f"{self.queries} queries need as many keys, got {1 + self.distractors}",
                hint="raise distractors",
            )
        if not isinstance(self.template, str | None):
            raise RopepatchError(f"template must be a file, got {self.template!r}")
        for share in (*self.depths, self.threshold):
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
                raise RopepatchError(f"depths and threshold must be from 0 to 1, got {share!r}")


@dataclass(frozen=True, kw_only=True)
class LmEvalTask:
    """Run tasks of lm-eval.

    Args:
        tasks: Their names: those of `eval/tasks` or of the harness.
        metadata: What the tasks are given; `max_seq_lengths` is the target if it is not set.
        limit: Documents per task; None for all.

    Raises:
        RopepatchError: One of these is not what it must be.
    """

    name: ClassVar[str] = "lm-eval"
    tasks: tuple[str, ...]
    metadata: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None

    def __post_init__(self) -> None:
        _check_count("limit", self.limit)
        if not self.tasks or not all(isinstance(name, str) for name in self.tasks):
            raise RopepatchError(f"tasks must be names of lm-eval tasks, got {self.tasks!r}")
        if not isinstance(self.metadata, dict):
            raise RopepatchError(f"metadata must be a mapping, got {self.metadata!r}")


Task = PerplexityTask | PasskeyTask | LmEvalTask
TASKS: dict[str, type[Task]] = {kind.name: kind for kind in (PerplexityTask, PasskeyTask, LmEvalTask)}


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


def check_text(text: str | None, model: str | None) -> None:
    """Refuse to read nothing.

    Raises:
        RopepatchError: No text, for a model that has none of its own.
    """
    if text is None and model != "tiny":
        raise RopepatchError(
            "--text is missing", hint="--text FILE, a folder, a JSONL file or a `datasets` id"
        )


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


def _check_name(key: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise RopepatchError(
            f"{key} must be one of {', '.join(known)}, got {value!r}", hint="eval/README.md says what each is"
        )


def _check_count(key: str, value: object) -> None:
    if value is not None and not is_count(value):
        raise RopepatchError(f"{key} must be a whole number above 0, got {value!r}")
