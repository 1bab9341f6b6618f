"""Results: each a measurement with its provenance, as one JSON file; and those that can be compared."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Callable, Mapping, Sequence
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
from ropepatch.evaluation.intervals import FEWEST, Mean
from ropepatch.evaluation.retrieval import why_not_counted
from ropepatch.files import json_text, parse_json, read_text, whole_file
from ropepatch.model.checkpoint import Keys, Number, Text, Tokens, Whole
from ropepatch.settings import refusal

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Nats or tokens of a cluster; beyond it a float overflows in sums and squares
MOST = 1e30
FLOOR = "floor"  # the label of the least possible loss
BASELINE = "baseline"  # the label of a model without scaling
FEW = 5  # documents or prompts; fewer give a warning
UNITS = {"perplexity": "documents", "retrieval": "prompts"}

OPEN = ConfigDict(extra="allow", strict=True)


@with_config(OPEN)
class Place(TypedDict, total=False):
    """The place of a row, in the keys that computations and figures use; other keys are free."""

    kind: Text
    length: Tokens
    begin: Whole
    end: Tokens
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
    """

    title: str
    text: Callable[[float], str]
    better: Literal[-1, 0, 1] = 0
    share: bool = False

    def interval(self, row: Row) -> str:
        """The interval of a row as text; empty if there is none."""
        if row.low is None or row.high is None:
            return ""
        return f"{self.text(row.low)} to {self.text(row.high)}"


MEASURES: dict[str, Measure] = {
    "loss": Measure("Loss (nats/token)", "{:z.3f}".format, -1),
    "gain": Measure("Gain from the longer context (nats/token)", "{:z.3f}".format, 1),
    "found": Measure("Retrieval accuracy", "{:.0%}".format, 1, share=True),
    "log_prob": Measure("Answer log-prob (nats/token)", "{:z.2f}".format, 1),
}


def measure_of(name: str) -> Measure:
    """The measure of a row; an unknown name, such as a metric of lm-eval, is its own title."""
    return MEASURES.get(name) or Measure(name, "{:.4g}".format)


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
        return measure_of(self.measure).interval(self)

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
    kind: str | None

    @property
    def title(self) -> str:
        """Its name in tables and figures."""
        return ", ".join(filter(None, [measure_of(self.measure).title, self.kind]))

    def of(self, result: Result) -> list[Row]:
        """Its rows."""
        return [
            row
            for row in result.rows
            if row.measure == self.measure
            and by_length(row)
            and row.at.get("kind") == self.kind
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


# Comparisons


@dataclass(frozen=True)
class Comparison:
    """Results that were measured with the same settings."""

    model: str  # its name
    trained: int  # its context length in tokens, original or extended
    target: int  # the target length in tokens
    task: str  # its name
    parameters: Mapping[str, Any]
    results: Mapping[str, Result]  # by a unique name; without the floor
    floor: Result | None  # the least possible loss, if it is known
    extended_from: int | None  # the original length, if extended without training

    @property
    def history(self) -> str:
        """The original length, and the length extended to without training, in words."""
        if self.extended_from is None:
            return f"trained on {self.trained:,} tokens"
        return f"trained on {self.extended_from:,}, extended to {self.trained:,} tokens"

    def rows(self, measure: str, *keys: str) -> dict[str, list[Row]]:
        """The rows of a measure at these keys, by name of the result, those of the floor last."""
        found = {name: one.of(measure, *keys) for name, one in self.named.items()}
        return {name: rows for name, rows in found.items() if rows}

    @property
    def named(self) -> dict[str, Result]:
        """Every result by its name, the floor last."""
        floor = {} if self.floor is None else {FLOOR: self.floor}
        return {**self.results, **floor}

    @property
    def kinds(self) -> list[str]:
        """The kinds of questions."""
        return list(self.parameters.get("kinds") or ())

    @property
    def series(self) -> list[Series]:
        """The measures by length, in order; never pooled over several kinds."""
        found: dict[Series, None] = {}
        for result in self.results.values():
            for row in result.rows:
                if by_length(row) and ("kind" in row.at) == (len(self.kinds) > 1):
                    found[Series(row.measure, row.at.get("kind"))] = None
        return [*found]

    @property
    def main(self) -> list[Series]:
        """The first measure by length, for every kind of question."""
        return [one for one in self.series if one.measure == self.series[0].measure]

    @property
    def not_counted(self) -> dict[str, str]:
        """The reason for each kind of question that does not count; see `not_counted`."""
        for result in self.results.values():
            if result.scaling is None and not result.fine_tuned:
                return not_counted(result)
        return {}

    def reservation(self, series: Series) -> str:
        """A note after the title of a series whose kind of question does not count, or was taught."""
        reasons, kind = self.not_counted, self._kind(series)
        notes = [f"not counted: {reasons[kind]}"] if kind in reasons else []
        taught = [
            name for name, result in self.results.items() if kind in result.taught
        ]
        if taught:
            notes.append(f"this kind was taught to {', '.join(taught)}")
        return f" ({'; '.join(notes)})" if notes else ""

    def counts(self, series: Series) -> bool:
        """Whether the kind of question of a series counts."""
        return self._kind(series) not in self.not_counted

    def _kind(self, series: Series) -> str:
        return series.kind or next(iter(self.kinds), "")

    def last(self, name: str, series: Series) -> Row | None:
        """The row of a result at the greatest length up to the target length."""
        rows = [
            row for row in series.of(self.results[name]) if row.length <= self.target
        ]
        return max(rows, key=lambda row: row.length, default=None)

    def warnings(self) -> list[str]:
        """Reasons to doubt its intervals: too few documents or prompts."""
        return few(next(iter(self.results.values()))) if self.results else []


def by_length(row: Row) -> bool:
    """Whether a row is at a length, of a text or of a kind of question."""
    return row.at.keys() - {"kind"} == {"length"}


def not_counted(base: Result) -> dict[str, str]:
    """The reason for each kind of question that does not count; see `why_not_counted`."""
    found: dict[str, dict[int, Mean]] = {}
    for row in base.of("found", "kind", "length"):
        found.setdefault(row.at["kind"], {})[row.length] = row.mean
    keys, trained = base.parameters.get("keys", 1), base.model["trained"]
    reasons = {}
    for kind, shares in found.items():
        reason = why_not_counted(shares, kind=kind, keys=keys, trained=trained)
        if reason is not None:
            reasons[kind] = reason
    return reasons


def few(result: Result) -> list[str]:
    """A warning if a result has too few documents or prompts."""
    rows = [row for row in result.rows if row.clusters and by_length(row)]
    clusters = min((len(row.clusters) for row in rows), default=FEW)
    if clusters >= FEW:
        return []
    unit = UNITS.get(result.task, "clusters")
    return [
        f"{unit}: {clusters}; with fewer than {FEW} only large differences are significant, "
        f"with fewer than {FEWEST} none"
    ]


def comparisons(results: Sequence[Result]) -> list[Comparison]:
    """Group comparable results, in order; spellings of model and text do not matter."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    names: dict[str, str] = {}  # of models, in the first spelling
    for result in results:
        model: dict[str, Any] = dict(result.model)
        model.pop("taught", None)
        if base := model.pop("fine_tuned_from", None):
            model["weights"] = base
        key = json.dumps(identity(model), sort_keys=True)
        settings = json.dumps(identity(result.parameters), sort_keys=True)
        place = key, result.task, result.target, settings
        groups.setdefault(place, []).append(result)
        names.setdefault(key, result.model["name"])
    return [_comparison(names[key], group) for (key, *_), group in groups.items()]


def by_place(groups: Sequence[Comparison]) -> dict[tuple[str, int], list[Comparison]]:
    """Comparisons by the name of their model and their target, in order of appearance."""
    places: dict[tuple[str, int], list[Comparison]] = {}
    for group in groups:
        places.setdefault((group.model, group.target), []).append(group)
    return places


def _comparison(model: str, group: Sequence[Result]) -> Comparison:
    named: dict[str, Result] = {}
    for result in group:
        if result.label != FLOOR:
            count = sum(other.label == result.label for other in named.values())
            named[f"{result.label} ({count + 1})" if count else result.label] = result
    return Comparison(
        model=model,
        trained=group[0].model["trained"],
        target=group[0].target,
        task=group[0].task,
        parameters=group[0].parameters,
        results=named,
        extended_from=group[0].model.get("extended_from"),
        floor=next((result for result in group if result.label == FLOOR), None),
    )


def first_figure(result: Result) -> str:
    """The first measure at its greatest length, with its interval, of every kind of question."""
    (group,) = comparisons([result])
    figures, length = [], 0
    for series in group.main:
        row = group.last(result.label, series)
        if row is not None:
            length = row.length
            interval = row.interval and f"({row.interval})"
            figures.append(" ".join(filter(None, [series.kind, row.text, interval])))
    if not figures:
        return ""
    title = measure_of(group.main[0].measure).title.lower()
    return f" at {length:,} tokens: {title} {', '.join(figures)}"
