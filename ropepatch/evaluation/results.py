"""A measurement and what stands behind it, as one JSON file."""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
import reprlib
from collections.abc import Sequence
from dataclasses import asdict, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.curves import LossCurve, Perplexity
from ropepatch.files import json_text, parse_json, read_text, whole_file
from ropepatch.settings import refusal, shown

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ropepatch.evaluation.passkey import Passkey, PasskeyGrid

SCHEMA = 1
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True, extra="forbid"))
class Result:
    """One task on one model.

    Attributes:
        task: The name of a task, from `TASKS`.
        label: What tables and figures call it: the method, ``as it is``, or the name of an adaptation.
        model: ``name``, ``revision``, ``weights`` (a fingerprint) and ``trained`` (its context in tokens);
            of one that ropepatch extended and nobody trained since ``extended_from``, the context before; of
            weights that were made from it also ``adapted_from``, the fingerprint of its own.
        scaling: ``method``, its parameters and frequencies; None for the model as it is.
        target: The context in tokens that is asked about.
        parameters: All that decides what is measured: protocol, lengths, seed, the text and its hash.
        tables: The figures. Of perplexity ``by_length``, ``by_position``, ``gain``, ``by_document`` and
            ``by_document_inside`` (within the trained context; older results lack it); of passkey
            ``cells`` and ``by_length``; of retrieval also ``by_kind``; of lm-eval ``scores``.
        env: Versions, device and dtype.
        seconds: What the measurement took.
        schema: The version of this format.
    """

    task: str
    label: str
    model: dict[str, Any]
    scaling: dict[str, Any] | None
    target: int
    parameters: dict[str, Any]
    tables: dict[str, list[Row]]
    env: dict[str, Any]
    seconds: float | None = field(default=None, compare=False)
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        _check_schema(self.schema)

    @property
    def adapted(self) -> bool:
        """Whether the weights are no longer those of the model that it names."""
        return self.model.get("adapted_from") not in (None, self.model.get("weights"))

    def to_json(self) -> str:
        """The text of its file."""
        return json_text(asdict(self)) + "\n"

    def write(self, file: Path) -> None:
        """Write the file whole or not at all."""
        with whole_file(file) as partial:
            partial.write_text(self.to_json(), encoding="utf-8")


def slug(name: str) -> str:
    """A name as a part of a file's: words and dashes."""
    return re.sub(r"[^\w.=]+", "-", name).strip("-")


def as_read(value: Any) -> Any:
    """A value as it comes back from a result's file: tuples are lists, keys are text."""
    return json.loads(json.dumps(value))


def read_result(file: Path) -> Result:
    """The result of a file.

    Raises:
        RopepatchError: No such file, no result, one of another format, or a value of the wrong kind.
    """
    try:
        content = parse_json(read_text(file))
    except (OSError, ValueError, RecursionError) as error:
        raise RopepatchError(
            f"{file} is not a result: {error}", hint="give a JSON file of a suite"
        ) from error
    try:
        if not isinstance(content, dict):
            raise RopepatchError(f"a result must be a mapping, got {shown(content)}")
        _check_schema(content.get("schema", SCHEMA))  # first: another format may have other keys
        try:
            return Result(**content)
        except ValidationError as error:
            raise refusal(error, Result, content) from error
    except RopepatchError as error:
        raise RopepatchError(f"{file}: {error}", hint=error.hint) from error


def _check_schema(schema: object) -> None:
    if schema != SCHEMA:
        raise RopepatchError(
            f"a result of format {reprlib.repr(schema)}, expected {SCHEMA}",
            hint="measure again with this version",
        )


def loss_row(read: Perplexity) -> Row:
    """Mean loss with its interval, perplexity, and counts."""
    low, high = read.interval
    return {
        "nats": read.mean,
        "interval": [finite(low), finite(high)],
        "perplexity": finite(read.value),
        "tokens": read.num_tokens,
        "documents": read.num_documents,
    }


def by_length(curve: LossCurve, lengths: Sequence[int]) -> list[Row]:
    """The first tokens up to each length."""
    return [{"length": length, **loss_row(curve.at(length))} for length in lengths]


def by_position(curve: LossCurve, edges: Sequence[int]) -> list[Row]:
    """The stretches of positions between neighbouring edges."""
    return [
        {"begin": begin, "end": end, **loss_row(curve.between(begin, end))} for begin, end in pairwise(edges)
    ]


def passkey_cells(grid: PasskeyGrid) -> list[Row]:
    """Every length and depth."""
    return [
        {"length": length, "depth": depth, **_count(cell)} for (length, depth), cell in grid.cells.items()
    ]


def passkey_by_length(grid: PasskeyGrid) -> list[Row]:
    """Every length, all depths together, and what was found of each prompt, for comparisons in pairs."""
    cells = {length: grid.at(length) for length in grid.lengths}
    return [
        {"length": length, **_count(cell)}
        | ({"found": list(cell.found), "wanted": grid.queries} if cell.found else {})
        for length, cell in cells.items()
    ]


def mean_nats(rows: Sequence[Row]) -> float:
    """The mean over the tokens of several rows."""
    tokens: int = sum(row["tokens"] for row in rows)
    return math.fsum(row["nats"] * row["tokens"] for row in rows) / tokens


def by_document(curve: LossCurve, within: int | None = None) -> list[Row]:
    """The sums of every document, or of its first ``within`` tokens, for paired comparisons."""
    read = curve.between(0, within or 1 + max(map(len, curve.nll)))
    return [{"nats": nats, "tokens": tokens} for nats, tokens in read.documents]


def document_sums(result: Result, table: str = "by_document") -> Perplexity:
    """What was read of every document, for differences in pairs."""
    documents = tuple((row["nats"], row["tokens"]) for row in result.tables[table])
    return Perplexity(sum(nats for nats, _ in documents), sum(tokens for _, tokens in documents), documents)


def _count(cell: Passkey) -> Row:
    return {"correct": cell.correct, "n": cell.n, "interval": list(cell.interval)}


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


def finite(value: float) -> float | None:
    """The value, or None if it is infinite, which JSON cannot say."""
    return value if math.isfinite(value) else None


def identity(value: Any) -> Any:
    """Without the names of model and text, which fingerprint and hash tell better than any spelling."""
    if not isinstance(value, dict) or not {"weights", "digest"} & value.keys():
        return value
    return {key: item for key, item in value.items() if key not in ("name", "text", "extended_from")}
