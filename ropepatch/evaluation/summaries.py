"""Results in few numbers, as a checkpoint's record and its card quote them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.comparisons import Comparison, comparisons
from ropepatch.evaluation.results import Result, as_read
from ropepatch.evaluation.tasks import task_of


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """What is known at the trained context and at the target, by task and label, as JSON-ready data.

    Args:
        results: What was measured of one model for one target.

    Returns:
        ``model``, ``trained`` and ``target`` (both in tokens), and ``tasks``: each with its settings and, by
        label, the rows of every measure at the trained context and at the target, or the next length below
        that was measured; of lm-eval all scores.

    Raises:
        RopepatchError: No results, or those of several models or targets.
    """
    groups = comparisons(results)
    places = {(group.model, group.trained, group.target) for group in groups}
    if len(places) != 1:
        raise RopepatchError(f"a summary is of one model and one target, got {len(places)} of these")
    ((model, trained, target),) = places
    tasks = [_task(group) for group in groups if group.results]
    content: dict[str, Any] = as_read({"model": model, "trained": trained, "target": target, "tasks": tasks})
    return content


def _task(group: Comparison) -> dict[str, Any]:
    task = task_of(group.task)
    settings = {key: group.parameters[key] for key in task.identity if key in group.parameters}
    return {
        "task": group.task,
        **settings,
        "results": {name: _quoted(group, result) for name, result in group.named().items()},
    }


def _quoted(group: Comparison, result: Result) -> list[dict[str, Any]]:
    """At the trained context and at the target, or the next length below; and what has no length."""
    quoted = [row for row in result.rows if "task" in row.at]
    for measure in dict.fromkeys(row.measure for row in result.rows):
        rows = {row.length: row for row in result.of(measure, "length")}
        bounds = (group.trained, group.target)
        places = {max(within) for bound in bounds if (within := [n for n in rows if n <= bound])}
        quoted += [rows[length] for length in sorted(places)]
    return [row.tidy() for row in quoted]
