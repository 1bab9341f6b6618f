"""Results in few numbers, as a checkpoint's record and its card quote them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.comparisons import FLOOR, comparisons
from ropepatch.evaluation.results import as_read

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ropepatch.evaluation.comparisons import Comparison
    from ropepatch.evaluation.results import Result, Row

ASKED = {  # what tells one measurement of a task from another
    "perplexity": ("protocol", "stride", "bos", "text", "digest", "pieces", "read"),
    "passkey": ("trials", "depths", "seed", "distractors", "queries"),
    "lm-eval": ("tasks", "limit", "max_length"),
}
QUOTED = {  # of a row
    "perplexity": ("nats", "interval"),
    "passkey": ("correct", "n", "interval"),
    "lm-eval": ("task", "metric", "value", "stderr", "n"),
}


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """What is known at the trained context and at the target, by task and label, as JSON-ready data.

    Args:
        results: Of one model and one target.

    Returns:
        ``model``, ``trained`` and ``target`` (both in tokens), and ``tasks``: each with its settings and, by
        label, of perplexity the mean loss in nats over the first ``trained`` and over the first ``target``
        tokens, of pass keys those found in prompts of these lengths, all by length; of lm-eval the scores. A
        length that was not measured gives way to the next below it.

    Raises:
        RopepatchError: No results, or those of several models or targets.
    """
    groups = comparisons(results)
    places = {(group.model, group.trained, group.target) for group in groups}
    if len(places) != 1:
        raise RopepatchError(f"a summary is of one model and one target, got {len(places)} of these")
    ((model, trained, target),) = places
    tasks = [_task(group) for group in groups if group.results]
    made: dict[str, Any] = as_read({"model": model, "trained": trained, "target": target, "tasks": tasks})
    return made


def _task(group: Comparison) -> dict[str, Any]:
    asked = {key: group.parameters[key] for key in ASKED[group.task] if key in group.parameters}
    named = group.results if group.floor is None else {FLOOR: group.floor, **group.results}
    return {"task": group.task, **asked, "results": {name: _figures(group, named[name]) for name in named}}


def _figures(group: Comparison, result: Result) -> dict[str, Any] | list[Row]:
    if group.task == "lm-eval":
        return [_quoted(group.task, row) for row in result.tables["scores"]]
    rows: Mapping[int, Row] = {row["length"]: row for row in result.tables["by_length"]}
    return {
        str(max(within)): _quoted(group.task, rows[max(within)])
        for bound in (group.trained, group.target)
        if (within := [length for length in rows if length <= bound])
    }


def _quoted(task: str, row: Row) -> Row:
    return {key: row[key] for key in QUOTED[task] if key in row}
