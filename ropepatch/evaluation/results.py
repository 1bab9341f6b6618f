"""A measurement with its provenance, as one JSON file."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Callable
from dataclasses import asdict, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NotRequired

import torch
import transformers
from pydantic import (
    ConfigDict,
    Field,
    StrictFloat,
    StrictInt,
    TypeAdapter,
    ValidationError,
    with_config,
)
from pydantic.dataclasses import dataclass
from typing_extensions import TypedDict

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.intervals import Mean
from ropepatch.files import json_text, parse_json, read_text, whole_file
from ropepatch.model.checkpoint import Keys, Number, Text, Tokens, Whole
from ropepatch.settings import Share, refusal

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Nats or tokens of a cluster; beyond it a float overflows in sums and squares
MOST = 1e30


OPEN = ConfigDict(extra="allow", strict=True)


@with_config(OPEN)
class Place(TypedDict, total=False):
    """The place of a row, in the keys that computations and figures use; other keys are free."""

    kind: Text
    length: Tokens
    begin: Whole
    end: Tokens
    depth: Share | Text
    task: Text
    version: Text


@with_config(OPEN)
class Model(TypedDict):
    """The model of a result."""

    name: Text
    revision: NotRequired[Text | None]
    weights: NotRequired[Text | None]
    trained: Tokens
    extended_from: NotRequired[Tokens]
    fine_tuned_from: NotRequired[Text]
    taught: NotRequired[list[Text]]


@with_config(OPEN)
class Scaling(TypedDict):
    """The scaling of a result."""

    method: Text
    factor: Number
    parameters: Keys
    target: NotRequired[Tokens]
    attention_factor: Number


Cluster = tuple[
    Annotated[StrictFloat, Field(ge=-MOST, le=MOST)],
    Annotated[StrictFloat, Field(gt=0, le=MOST)],
]


class Measure(NamedTuple):
    """A measure, and the format of its values.

    Args:
        title: Its name in tables and figures.
        text: Formats a value.
        better: 1 if higher is better, -1 if lower is, 0 if unknown.
        share: Whether it is a share of answers, each 0 or 1.
        hub: Its name on the Hub.
    """

    title: str
    text: Callable[[float], str]
    better: Literal[-1, 0, 1] = 0
    share: bool = False
    hub: str = ""


MEASURES: dict[str, Measure] = {
    "loss": Measure("Loss (nats/token)", "{:z.3f}".format, -1, hub="loss"),
    "gain": Measure(
        "Gain from the longer context (nats/token)", "{:z.3f}".format, 1, hub="gain"
    ),
    "found": Measure(
        "Retrieval accuracy", "{:.0%}".format, 1, share=True, hub="accuracy"
    ),
    "log_prob": Measure(
        "Answer log-prob (nats/token)", "{:z.2f}".format, 1, hub="log_prob"
    ),
}


def measure_of(name: str) -> Measure:
    """The measure of a row; an unknown name, such as a metric of lm-eval, is its own title."""
    return MEASURES.get(name) or Measure(
        name, "{:.4g}".format, hub={"acc": "accuracy"}.get(name, name)
    )


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Row:
    """One number.

    Attributes:
        measure: A name from `MEASURES`, or a metric of lm-eval.
        at: Its place: ``length`` in tokens, positions from ``begin`` to ``end``, a ``kind`` of question, a
            ``depth``, or a ``task`` of lm-eval.
        value: The number; None if it is not finite.
        low: The lower end of its 95 % confidence interval; None if there is none.
        high: The upper end.
        n: The number of tokens, answers or documents behind it.
        clusters: The sum and the weight of each document or prompt, for paired differences; empty if
            unknown.
    """

    measure: str
    at: Place
    value: StrictFloat | None
    low: StrictFloat | None = None
    high: StrictFloat | None = None
    n: StrictInt
    clusters: list[Cluster] = field(default_factory=list, repr=False)

    @property
    def length(self) -> int:
        """The length in tokens at which it was measured."""
        return int(self.at["length"])

    @property
    def mean(self) -> Mean:
        """The mean over its clusters."""
        return Mean(tuple(self.clusters), measure_of(self.measure).share)

    @property
    def interval(self) -> str:
        """Its interval as text; empty if there is none."""
        if self.low is None or self.high is None:
            return ""
        text = measure_of(self.measure).text
        return f"{text(self.low)} to {text(self.high)}"

    @property
    def text(self) -> str:
        """Its value as text."""
        return "–" if self.value is None else measure_of(self.measure).text(self.value)


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Result:
    """One task on one model.

    Attributes:
        task: The name of a task, from `TASKS`.
        label: Its name in tables and figures: the method, ``baseline``, or the name of a fine-tuned model.
        model: ``name``, ``revision``, ``weights`` (a fingerprint) and ``trained`` (its context length in
            tokens). For a model that ropepatch extended without training also ``extended_from``, its length
            before; for a fine-tuned model also ``fine_tuned_from``, the fingerprint of the weights before, and
            ``taught``, the kinds of questions of its training.
        scaling: ``method``, its parameters and frequencies; None for the baseline.
        target: The target length in tokens.
        parameters: The settings of the measurement: protocol, lengths, seed, the text and its hash.
        rows: The measured numbers.
        env: Versions, device and dtype.
        seconds: The duration of the measurement.
        schema: The version of this format.
    """

    task: str
    label: str
    model: Model
    scaling: Scaling | None
    target: Tokens
    parameters: dict[str, Any]
    rows: list[Row]
    env: dict[str, Any]
    seconds: float | None = field(default=None, compare=False)
    schema: Literal[2] = 2

    @property
    def taught(self) -> list[str]:
        """The kinds of questions that the training of its weights asked."""
        return list(self.model.get("taught") or ())

    @property
    def fine_tuned(self) -> bool:
        """Whether the weights were fine-tuned."""
        return self.model.get("fine_tuned_from") not in (
            None,
            self.model.get("weights"),
        )

    def of(self, measure: str, *keys: str) -> list[Row]:
        """Its rows of a measure whose place has exactly these keys."""
        return [
            row
            for row in self.rows
            if row.measure == measure and row.at.keys() == set(keys)
        ]

    def row(self, measure: str, **at: int | float | str) -> Row | None:
        """The row of a measure at a place, or None."""
        return next((row for row in self.of(measure, *at) if row.at == at), None)

    def mean(self, measure: str, **at: int | float | str) -> Mean:
        """The mean of a measure at a place.

        Raises:
            RopepatchError: If it has no clusters there.
        """
        row = self.row(measure, **at)
        if row is None or not row.clusters:
            raise RopepatchError(
                f"{self.label} has no {measure} at {at}",
                hint="measure again with `ropepatch compare`",
            )
        return row.mean

    def to_json(self) -> str:
        """The text of its file."""
        return results_json(asdict(self)) + "\n"

    def write(self, file: Path) -> None:
        """Write the file whole or not at all."""
        with whole_file(file) as partial:
            partial.write_text(self.to_json(), encoding="utf-8")


class Series(NamedTuple):
    """A measure by length, of one kind of question if there are several."""

    measure: str
    kind: str | None = None

    @property
    def title(self) -> str:
        """Its name in tables and figures."""
        return ", ".join(filter(None, [measure_of(self.measure).title, self.kind]))

    def at(self, length: int) -> dict[str, int | str]:
        """The place of its row at a length."""
        return (
            {"length": length}
            if self.kind is None
            else {"kind": self.kind, "length": length}
        )

    def of(self, result: Result) -> list[Row]:
        """Its rows."""
        return [
            r
            for r in result.of(self.measure, *self.at(0))
            if r.at.get("kind") == self.kind
        ]


# An indented list; strings in JSON have no line breaks
NUMBERS = re.compile(r"\[\n\s*([-+.\deE,\s]+?)\n\s*\]")


def results_json(content: Any) -> str:
    """JSON with every list of numbers on a line of its own."""
    return NUMBERS.sub(
        lambda found: f"[{' '.join(found[1].split())}]", json_text(content)
    )


def slug(name: str) -> str:
    """A name as part of a file name: words and dashes."""
    return re.sub(r"[^\w.=]+", "-", name).strip("-")


def as_read(value: Any) -> Any:
    """A value after a round trip through JSON: tuples become lists, keys text."""
    return json.loads(json.dumps(value))


RESULT = TypeAdapter(Result)


def read_result(file: Path) -> Result:
    """The result in a file."""
    try:
        content = parse_json(read_text(file))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RopepatchError(
            f"{file} is not a result: {reason}",
            hint="pass a folder of results, or a file in it",
        ) from error
    try:
        return RESULT.validate_python(content)
    except ValidationError as error:
        wrong = refusal(error, Result, content)
        raise RopepatchError(f"{file}: {wrong}", hint=wrong.hint) from error


def row_of(measure: str, at: Any, mean: Mean) -> Row:
    """The row of a mean at a place."""
    value, low, high, n = mean.figures
    clusters = list(mean.clusters)
    return Row(
        measure=measure, at=at, value=value, low=low, high=high, n=n, clusters=clusters
    )


def environment(model: PreTrainedModel) -> dict[str, str]:
    """Versions, device and dtype."""
    on_gpu = model.device.type == "cuda"
    return {
        "ropepatch": importlib.metadata.version("ropepatch"),
        "transformers": transformers.__version__,
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name() if on_gpu else str(model.device),
        "dtype": str(model.dtype),
    }


def identity(value: Any) -> Any:
    """A value without the names of model and text, which fingerprint and hash identify better."""
    if not isinstance(value, dict) or not {"weights", "digest"} & value.keys():
        return value
    names = ("name", "text", "extended_from")
    return {key: item for key, item in value.items() if key not in names}
